"""Checks of the network: ports, connection to the trainer, probe, throughput, clocks and keys.

The trainer has NUM_PORTS consecutive ports from wire.port on. The last one answers probes: small
messages with which the doctor of a generator measures the connection. Keys are CURVE keys, with
which ZeroMQ encrypts connections and the trainer recognizes generators.
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
from peralta_zmq.atomic_files import is_held, is_loopback
from peralta_zmq.config import Config
from peralta_zmq.errors import WireError
from peralta_zmq.operate.doctor.checks import Check, failed_check
from peralta_zmq.operate.doctor.machine_checks import LOCAL_NETWORK

NUM_PORTS = 4  # rollouts, announcements, generator status, probe
PROBE_SECONDS = 10.0  # timeout; longer than the 3 s after which a refused handshake is reported
NUM_PROBES = 5
CONNECT_SECONDS, RETRY_SECONDS = 3.0, 0.5
THROUGHPUT_SECONDS, THROUGHPUT_TIMEOUT = 1.0, 60.0
CLOCK_NOTE_SECONDS, CLOCK_FAIL_SECONDS = 2.0, 3600.0  # difference between two clocks


def is_this_machine(host: str) -> bool:
    """True if a host name or address belongs to this machine."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, number, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, number) as opened:
            opened.bind((address[0], 0))
            return True
    return False


def check_ports(config: Config, stack: ExitStack) -> Check:
    """Check that the trainer's ports are free, and hold them until the stack is closed.

    The port of probes is left free for `serve_probes`. Ports in use by a running trainer of this
    run are no failure.
    """
    bind, number = config.wire.bind, config.wire.port
    ports = range(number, number + NUM_PORTS)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        for number in ports:
            server = socket.create_server((bind.strip("[]"), number), family=family)
            stack.enter_context(server)
            if number == ports[-1]:
                server.close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            remedy = "set wire.bind to an address of this machine, or 0.0.0.0 for all"
            return Check(False, f"cannot listen on {bind} ({error.strerror})", remedy)
        if trainer_runs(config.run_folder):
            return Check(True, f"the trainer of run {config.run.name} has {ports[0]} already")
        return failed_check(WireError(wire.port_in_use_message(number)))
    return Check(True, f"{ports[0]} to {ports[-1]} are free on {bind}")


def trainer_runs(folder: Path) -> bool:
    """True if a trainer on this machine holds the lock of a run folder."""
    return is_held(folder / "lock") is True


def check_reach(config: Config, *, wait_seconds: float = 0.0) -> Check:
    """Check that all ports of the trainer accept TCP connections; retries for `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        check = _connect_all(config.wire.host, config.wire.port)
        if check.ok or time.monotonic() > deadline:
            return check
        time.sleep(RETRY_SECONDS)


def _connect_all(host: str, first: int) -> Check:
    started = time.monotonic()
    for port in range(first, first + NUM_PORTS):
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            remedy = _connect_remedy(error, host, port, is_first=port == first)
            return Check(False, f"{host}:{port}: {error.strerror or error}", remedy)
    milliseconds = 1e3 * (time.monotonic() - started) / NUM_PORTS
    ports = f"{first} to {first + NUM_PORTS - 1}"
    return Check(True, f"{host} accepts connections on ports {ports}, {milliseconds:.1f} ms each")


def _connect_remedy(error: OSError, host: str, port: int, *, is_first: bool) -> str:
    if isinstance(error, socket.gaierror):
        return "set wire.host to the trainer's address, or add its name to /etc/hosts"
    if error.errno == errno.EHOSTUNREACH and sys.platform == "darwin":
        return LOCAL_NETWORK
    if error.errno == errno.ECONNREFUSED and is_first:
        return "start the trainer (bin/trainer @ CONFIG), with wire.bind = 0.0.0.0"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "is that machine on, and in the same network or VPN? Try ping"
    return f"open port {port} in the firewall of {host}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A reply to a probe, the time at which the probe was sent, and the round-trip time."""

    reply: wire.ProbeReply
    sent: float  # unix seconds by the clock of this machine
    seconds: float


def open_probe_client(config: Config, name: str) -> wire.ProbeClient:
    """Connect to the trainer's probe port. Raises WireError for a key file."""
    folder = config.keys_folder
    keys = wire.generator_keys(folder, name) if folder else None
    address = f"tcp://{config.wire.host}:{config.wire.port}"
    return wire.ProbeClient(wire.next_port(address, NUM_PORTS - 1), keys=keys)


def send_probes(client: wire.ProbeClient) -> ProbeResult:
    """Return the fastest of NUM_PROBES round trips. Raises WireError without a reply."""
    results: list[ProbeResult] = []
    for _ in range(NUM_PROBES):
        sent = time.time()
        reply, seconds = client.request("info", timeout=PROBE_SECONDS)
        results.append(ProbeResult(reply, sent, seconds))
    return min(results, key=lambda result: result.seconds)


def check_probe(result: ProbeResult, run: str) -> Check:
    """Check that the reply names the configured `run`; reports round-trip time and worker info."""
    reply = result.reply
    if reply.run != run:
        detail = f"run {reply.run} listens at wire.host, not {run}"
        return Check(False, detail, "give both sides the same config, or another wire.port")
    versions = ", ".join(f"{name} {value}" for name, value in sorted(reply.worker_info.items()))
    return Check(
        True, f"the {reply.role} of run {run} answers in {1e3 * result.seconds:.1f} ms ({versions})"
    )


def check_throughput(client: wire.ProbeClient) -> Check:
    """Measure the throughput to the trainer's machine."""
    speed = client.measure_throughput(seconds=THROUGHPUT_SECONDS, timeout=THROUGHPUT_TIMEOUT)
    return Check(True, f"{speed / 1e6:.2f} MB/s to the trainer")


def check_clock(result: ProbeResult) -> Check:
    """Compare the clocks of both machines; only logs, events and certificates depend on them."""
    uncertainty = result.seconds / 2
    ahead = result.sent + uncertainty - result.reply.time  # the reply is made in the middle
    side = "ahead of" if ahead > 0 else "behind"
    detail = f"{abs(ahead):.3f} s {side} the trainer's (within {uncertainty:.3f} s)"
    remedy = "set the clock: sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com)"
    difference = abs(ahead) - uncertainty
    ok = difference <= CLOCK_FAIL_SECONDS
    return Check(ok, detail, remedy if difference > CLOCK_NOTE_SECONDS else "")


def check_keys(config: Config, role: str, name: str) -> Check:
    """Check the key files of a role. Raises WireError if one is missing or readable by everyone."""
    from peralta_zmq.wire import auth

    folder, bind = config.keys_folder, config.wire.bind
    if folder is None:
        remedy = "make keys with bin/doctor keygen --security.keys DIR"
        is_open = role == "trainer" and not is_loopback(bind)
        return Check(True, "no keys, and so no encryption", remedy if is_open else "")
    if role == "generator":
        auth.generator_keys(folder, name)
        return Check(True, f"{folder} has the keys of {name} and of the trainer")
    auth.trainer_secret(folder)
    names = sorted(auth.known_generators(folder).values())
    if not names:
        detail = f"{folder} has no generator's public key"
        return Check(False, detail, "make one with bin/doctor keygen --generator.name NAME")
    return Check(True, f"{folder} admits {', '.join(names)}")


def serve_probes(
    config: Config, stack: ExitStack, folder: Path | None, worker_info: dict[str, str]
) -> Check:
    """Answer the doctors of generators in place of a trainer until the stack is closed.

    Creates files in the weights folder on request. Raises WireError if the port is in use, or for
    a key file.
    """
    from peralta_zmq.weights.backends import ProbeFile

    keys = config.keys_folder
    authenticator = stack.enter_context(closing(wire.CurveAuthenticator(keys))) if keys else None
    create_file = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        create_file = stack.enter_context(closing(ProbeFile(folder))).create
    reply = wire.ProbeReply(config.run.name, role="doctor", worker_info=worker_info)
    address = wire.next_port(f"tcp://{config.wire.bind}:{config.wire.port}", NUM_PORTS - 1)
    server = wire.ProbeServer(address, reply, create_file=create_file, authenticator=authenticator)
    stack.enter_context(closing(server))
    return Check(True, f"other doctors are answered on {server.address}")
