"""Checks of the network: ports, connection, probe, throughput, clocks and keys.

The last of the trainer's ports answers probes: small messages with which the doctor of a generator
measures the connection.
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
from peralta_zmq.addresses import listen, with_port
from peralta_zmq.atomic_files import is_held
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, WireError, program_name
from peralta_zmq.observe.metrics import LOCK
from peralta_zmq.operate.doctor.checks import Check, failed_check
from peralta_zmq.operate.doctor.machine_checks import LOCAL_NETWORK
from peralta_zmq.wire import auth

NUM_PORTS = 4  # rollouts, announcements, generator status, probe
# Timeout of a probe; longer than the 3 s after which ZeroMQ reports a refused handshake.
PROBE_SECONDS = 10.0


def is_this_machine(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        # A socket can only be bound to an address of this machine.
        with suppress(OSError), socket.socket(family, kind, protocol) as opened:
            opened.bind((address[0], 0, *address[2:]))
            return True
    return False


def check_ports(config: Config, stack: ExitStack) -> Check:
    """Check that the trainer's ports are free; listen on them until `stack` is closed.

    Other machines can then check the connection. The last port is closed again, for `serve_probes`.
    """
    bind = config.wire.bind
    port = config.wire.port
    address = wire.interface_address(bind)
    ports = range(port, port + NUM_PORTS)
    try:
        for port in ports:
            server = stack.enter_context(listen(address, port, host_setting="wire.bind"))
            if port == ports[-1]:
                server.close()
    except ConfigError as error:
        remedy = "set wire.bind to an address of this machine, or 0.0.0.0 for all"
        return Check(False, str(error).partition("; ")[0], remedy)
    except OSError:
        if is_trainer_running(config.run_folder):
            return Check(True, f"the running trainer of run {config.run.name} uses the ports")
        return failed_check(WireError(wire.port_in_use_message(port)))
    return Check(True, f"{ports[0]} to {ports[-1]} are free on {bind}")


def is_trainer_running(folder: Path) -> bool:
    return is_held(folder / LOCK) is True


def check_reach(config: Config, *, wait_seconds: float = 0.0) -> Check:
    """Check that the trainer's ports accept connections; retries for `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        check = _connect_all(config.wire.host, config.wire.port)
        if check.ok or time.monotonic() > deadline:
            return check
        time.sleep(0.5)


def _connect_all(host: str, first: int) -> Check:
    started = time.monotonic()
    for port in range(first, first + NUM_PORTS):
        try:
            socket.create_connection((host, port), timeout=3.0).close()
        except OSError as error:
            remedy = _connect_remedy(error, host, port, is_first=port == first)
            return Check(False, f"{with_port(host, port)}: {error.strerror or error}", remedy)
    milliseconds = 1e3 * (time.monotonic() - started) / NUM_PORTS
    ports = f"{first} to {first + NUM_PORTS - 1}"
    return Check(True, f"{host} accepts connections on ports {ports}, {milliseconds:.1f} ms each")


def _connect_remedy(error: OSError, host: str, port: int, *, is_first: bool) -> str:
    if isinstance(error, socket.gaierror):
        return "set wire.host to the trainer's address, or add its name to /etc/hosts"
    if error.errno == errno.EHOSTUNREACH and sys.platform == "darwin":
        return LOCAL_NETWORK
    if error.errno == errno.ECONNREFUSED and is_first:
        bind = "::" if ":" in host else "0.0.0.0"
        return f"start the trainer ({program_name('trainer')} @ CONFIG), with wire.bind = {bind}"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"is {host} on, and in the same network or VPN? Try ping {host}"
    return f"open port {port} in the firewall of {host}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    reply: wire.ProbeReply
    sent: float  # unix seconds by the clock of this machine
    seconds: float


def open_probe_client(config: Config) -> wire.ProbeClient:
    """Connect to the trainer's probe port. Raises WireError if a key file cannot be used."""
    folder = config.keys_folder
    keys = wire.generator_keys(folder, config.generator.full_name) if folder else None
    address = f"tcp://{with_port(config.wire.host, config.wire.port)}"
    return wire.ProbeClient(wire.next_port(address, NUM_PORTS - 1), keys=keys)


def send_probes(client: wire.ProbeClient, *, timeout_seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Send five probes; returns the fastest. Raises WireError without a reply."""
    results: list[ProbeResult] = []
    for _ in range(5):
        sent = time.time()
        reply, seconds = client.request("info", timeout=timeout_seconds)
        results.append(ProbeResult(reply, sent, seconds))
    return min(results, key=lambda result: result.seconds)


def check_probe(result: ProbeResult, run: str) -> Check:
    """Check that the reply is of run `run`; reports the round-trip time."""
    reply = result.reply
    if reply.run != run:
        detail = f"run {reply.run} listens at wire.host, not {run}"
        return Check(False, detail, "give both sides the same config, or another wire.port")
    return Check(True, f"the {reply.role} of run {run} answers in {1e3 * result.seconds:.1f} ms")


def check_throughput(client: wire.ProbeClient) -> Check:
    speed = client.measure_throughput(seconds=1.0, timeout=60.0)
    return Check(True, f"{speed / 1e6:.2f} MB/s to the trainer")


def check_clock(result: ProbeResult) -> Check:
    """Compare the clocks of both machines, used by logs, events and certificates."""
    uncertainty = result.seconds / 2
    ahead = result.sent + uncertainty - result.reply.time  # if the reply was sent half-way
    side = "ahead of" if ahead > 0 else "behind"
    detail = f"{abs(ahead):.3f} s {side} the trainer's (within {uncertainty:.3f} s)"
    remedy = "set the clock: sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com)"
    difference = abs(ahead) - uncertainty
    ok = difference <= 3600.0
    return Check(ok, detail, remedy if difference > 2.0 else "")


def check_keys(config: Config, role: str) -> Check | None:
    """Read the key files of a role; None without keys. Raises WireError and OutageError."""
    folder = config.keys_folder
    if folder is None:
        return None
    if role == "generator":
        name = wire.generator_keys(folder, config.generator.full_name).name
        return Check(True, f"{folder} has the keys of {name} and of the trainer")
    auth.trainer_secret(folder)
    names = sorted(auth.known_generators(folder).values())
    if not names:
        remedy = f"make one with {program_name('doctor')} keygen --generator.name NAME"
        return Check(False, f"{folder} has no generator's public key", remedy)
    return Check(True, f"{folder} admits {', '.join(names)}")


def serve_probes(config: Config, stack: ExitStack, folder: Path | None) -> Check:
    """Answer the probes of generators' doctors while no trainer runs, until `stack` is closed.

    A probe can create a file in `folder`, the weights folder, or None; see `check_visible`. Raises
    WireError.
    """
    from peralta_zmq.weights.backends import ProbeFile

    keys = config.keys_folder
    authenticator = stack.enter_context(closing(wire.Authenticator(keys)))
    create_file = None  # the server then refuses requests to create a file
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        create_file = stack.enter_context(closing(ProbeFile(folder))).create
    reply = wire.ProbeReply(config.run.name, role="doctor")
    address = f"tcp://{with_port(config.wire.bind, config.wire.port + NUM_PORTS - 1)}"
    server = wire.ProbeServer(address, reply, create_file=create_file, authenticator=authenticator)
    stack.enter_context(closing(server))
    return Check(True, f"probes are answered on {server.address}")
