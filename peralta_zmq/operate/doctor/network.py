"""The way to the trainer's machine: ports, a plain connection, a hello, speed, clocks and keys.

Knows addresses and what can be in their way; knows nothing of models or folders.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from peralta_zmq import wire
from peralta_zmq.atomic_files import is_held
from peralta_zmq.config import Config
from peralta_zmq.errors import WireError
from peralta_zmq.operate.doctor.check import Check, failed
from peralta_zmq.operate.doctor.machine import LOCAL_NETWORK

NUM_PORTS = 4  # rollouts, announcements, counters, hellos
HELLO_SECONDS = 10.0  # a handshake that is refused without a word says so after 3
NUM_HELLOS = 5
CONNECT_SECONDS = 3.0
RETRY_SECONDS = 0.5
BURST_SECONDS = 1.0
MANY_SECONDS, TOO_MANY_SECONDS = 2.0, 3600.0  # that two clocks may be apart


def address_of(config: Config) -> str:
    """Where generators find the trainer."""
    return f"tcp://{config.wire.host}:{config.wire.port}"


def is_here(host: str) -> bool:
    """Whether a name or address is of this very machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, number, _, where in found:
        with suppress(OSError), socket.socket(family, kind, number) as opened:
            opened.bind((where[0], 0))
            return True
    return False


def check_ports(config: Config, stack: ExitStack) -> Check:
    """The ports that a trainer listens on are free, and are ours until the stack is left.

    A trainer of this very run that has them is as good.
    """
    port, wires = config.wire.port, config.wire
    try:
        with _listening(wires.bind, port + NUM_PORTS - 1):
            pass  # for whoever answers
        for number in range(port, port + NUM_PORTS - 1):
            stack.enter_context(_listening(wires.bind, number))
    except WireError as error:
        if trains(config.run_folder):
            return Check("ports", True, f"the trainer of run {config.run.name} has {port} already")
        return failed("ports", error)
    except OSError as error:
        return Check("ports", False, f"cannot listen on {wires.bind} ({error.strerror})",
                     "set wire.bind to an address of this machine, or 0.0.0.0 for all")  # fmt: skip
    return Check("ports", True, f"{port} to {port + NUM_PORTS - 1} are free on {wires.bind}")


def check_reach(config: Config, *, patience: float = 0.0) -> Check:
    """All ports of the trainer accept plain TCP connections; tries for `patience` seconds."""
    ends = time.monotonic() + patience
    while True:
        found = _reach(config.wire.host, config.wire.port)
        if found.ok or time.monotonic() > ends:
            return found
        time.sleep(RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greeting, when we asked and when it was here: unix seconds by our clock."""

    greeting: wire.ProbeReply
    asked: float
    came: float

    @property
    def seconds(self) -> float:
        """The round trip."""
        return self.came - self.asked


def say_hello(guest: wire.ProbeClient) -> Answer:
    """The quickest of a few answers. Raises WireError when there is none."""
    answers: list[Answer] = []
    for _ in range(NUM_HELLOS):
        asked = time.time()
        greeting, seconds = guest.request("info", timeout=HELLO_SECONDS)
        answers.append(Answer(greeting, asked, asked + seconds))
    return min(answers, key=lambda each: each.seconds)


def check_hello(answer: Answer, run: str) -> Check:
    """It is our run that answers, and how soon."""
    greeting = answer.greeting
    if greeting.run != run:
        return Check("hello", False, f"run {greeting.run} listens there, not {run}",
                     "give both sides the same config, or another wire.port")  # fmt: skip
    facts = ", ".join(f"{name} {fact}" for name, fact in sorted(greeting.worker_info.items()))
    return Check("hello", True, f"the {greeting.role} of run {run} answers in "
                 f"{1e3 * answer.seconds:.1f} ms ({facts})")  # fmt: skip


def check_burst(guest: wire.ProbeClient) -> Check:
    """How much gets through."""
    speed = guest.measure_throughput(seconds=BURST_SECONDS, timeout=60.0)
    return Check("burst", True, f"{speed / 1e6:.2f} MB/s to the trainer")


def check_clock(answer: Answer) -> Check:
    """How far the two clocks are apart.

    Nothing is decided by a clock; logs, events and certificates are told by it.
    """
    ahead = (answer.asked + answer.came) / 2 - answer.greeting.time
    sure = answer.seconds / 2
    side = "ahead of" if ahead > 0 else "behind"
    detail = f"{abs(ahead):.3f} s {side} the trainer's (within {sure:.3f} s)"
    remedy = "set it: sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com)"
    if abs(ahead) - sure > TOO_MANY_SECONDS:
        return Check("clock", False, detail, remedy)
    return Check("clock", True, detail, remedy if abs(ahead) - sure > MANY_SECONDS else "")


def check_keys(config: Config, role: str, name: str) -> Check:
    """The key files that this side needs. Raises WireError for one that is missing or open."""
    from peralta_zmq.wire import auth

    folder = config.keys_folder
    if folder is None:
        open_to_all = role == "trainer" and not _is_loopback(config.wire.bind)
        return Check("keys", True, "none: no encryption", "make some with bin/doctor keygen "
                     "--security.keys DIR" if open_to_all else "")  # fmt: skip
    if role == "generator":
        auth.generator_keys(folder, name)
        return Check("keys", True, f"those of {name} and the trainer's are in {folder}")
    auth.trainer_secret(folder)
    known = sorted(auth.known_generators(folder).values())
    if not known:
        return Check("keys", False, f"{folder} has no generator's public key",
                     "make one with bin/doctor keygen --generator.name NAME")  # fmt: skip
    return Check("keys", True, f"{folder} lets in {', '.join(known)}")


def open_probe_client(config: Config, name: str) -> wire.ProbeClient:
    """What asks the trainer's machine. Raises WireError for a key file."""
    folder = config.keys_folder
    keys = wire.generator_keys(folder, name) if folder else None
    return wire.ProbeClient(wire.next_port(address_of(config), NUM_PORTS - 1), keys=keys)


def answer_others(
    config: Config, stack: ExitStack, *, folder: Path | None, hello: dict[str, str]
) -> Check:
    """Answer other doctors in the place of a trainer; files are shown in the weights folder.

    Raises WireError when the port is taken, or for a key file.
    """
    from peralta_zmq.weights.backends import ProbeFile

    keys, wires = config.keys_folder, config.wire
    gate = stack.enter_context(closing(wire.CurveAuthenticator(keys))) if keys else None
    show = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        show = stack.enter_context(closing(ProbeFile(folder))).create
    greeting = wire.ProbeReply(config.run.name, role="doctor", worker_info=hello)
    address = wire.next_port(f"tcp://{wires.bind}:{wires.port}", NUM_PORTS - 1)
    greeter = wire.ProbeServer(address, greeting, create_file=show, authenticator=gate)
    stack.enter_context(closing(greeter))
    return Check("answers", True, f"other doctors are answered on {greeter.address}")


def _listening(host: str, port: int) -> socket.socket:
    """Raises WireError when the port is taken; OSError when there is no such address."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise WireError(wire.port_in_use_message(port)) from None


def trains(folder: Path) -> bool:
    """Whether a trainer of this machine works in a run folder: it holds the folder's lock."""
    return is_held(folder / "lock") is True


def _reach(host: str, first: int) -> Check:
    """The first port that cannot be reached says why."""
    started = time.monotonic()
    for port in range(first, first + NUM_PORTS):
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            return _unreached(host, port, first, error)
    trip = 1e3 * (time.monotonic() - started) / NUM_PORTS
    return Check("reach", True, f"{host} accepts connections on ports {first} to "
                 f"{first + NUM_PORTS - 1}, {trip:.1f} ms each")  # fmt: skip


def _unreached(host: str, port: int, first: int, error: OSError) -> Check:
    reason = error.strerror or str(error)
    remedy = f"open port {port} in the firewall of {host}"
    if isinstance(error, socket.gaierror):
        remedy = "set wire.host to the trainer's address, or add its name to /etc/hosts"
    elif error.errno == errno.EHOSTUNREACH and sys.platform == "darwin":
        remedy = LOCAL_NETWORK
    elif error.errno == errno.ECONNREFUSED and port == first:
        remedy = "start the trainer (bin/trainer @ CONFIG), with wire.bind = 0.0.0.0"
    elif error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        remedy = "is it on, and in the same network or VPN? Try ping"
    return Check("reach", False, f"{host}:{port}: {reason}", remedy)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host.strip("[]") == "::1"
