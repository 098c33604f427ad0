"""Which looks belong to the trainer's machine and which to a generator's, and in which order.

Knows the config; knows nothing of how anything is looked at.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path

from peralta_zmq import wire
from peralta_zmq.config import Config, earlier_config
from peralta_zmq.errors import WireError
from peralta_zmq.operate.doctor import machine, network, weights, workload
from peralta_zmq.operate.doctor.check import Check, Look, Report

FOLDER_SECONDS = 120.0  # that a look into a mounted folder may take


def role_of(config: Config) -> str:
    """What this machine is to be when nobody says: the trainer where wire.host is here."""
    return "trainer" if network.is_here(config.wire.host) else "generator"


def visit_trainer(config: Config, book: Report, stack: ExitStack, *, answers: bool) -> bool:
    """All that the trainer's machine must have.

    When it `answers`, other doctors can reach this one until the stack is left; returns whether
    they can: not when the trainer itself is there already.
    """
    folder, size = _folder_of(config), workload.model_bytes(config)
    book.look("keys", lambda: network.check_keys(config, "trainer", "trainer"))
    free = book.look("ports", lambda: network.check_ports(config, stack))
    answers = answers and free and not network.trains(config.run_folder)
    if answers:
        hello = workload.facts(config)
        book.look("answers", lambda: network.answer_others(
            config, stack, folder=folder, hello=hello
        ))  # fmt: skip
    _look_at_machine(config, book)
    book.look("model", lambda: workload.check_model(config))
    book.look("reward", lambda: workload.check_reward(config))
    book.look("run", lambda: _check_run(config))
    if folder is None:
        _look_at_address(config, book, size, greeting=None)
    elif _is_there(book, folder, "trainer"):
        if _look_into(book, "writing", lambda: weights.check_writing(folder)) and folder.is_dir():
            run, trains = config.run_folder, network.trains(config.run_folder)
            _look_into(book, "owner", lambda: weights.check_owner(folder, run, trains=trains))
        _look_into(book, "space", lambda: weights.check_space(folder, size))
        _look_into(book, "speed", lambda: weights.check_speed(folder, size))
    return answers


def visit_generator(config: Config, book: Report, stack: ExitStack, *, patience: float) -> None:
    """All that a generator's machine must have, and its way to the trainer's."""
    name = config.generator.name or f"{socket.gethostname()}-{config.generator.index}"
    _look_at_machine(config, book)
    send = machine.send_into(config.wire.host)
    book.look("localnet", lambda: machine.check_local_network(machine.system(), send))
    book.look("reward", lambda: workload.check_reward(config))
    keyed = book.look("keys", lambda: network.check_keys(config, "generator", name))
    guest = None
    if book.look("reach", lambda: network.check_reach(config, patience=patience)) and keyed:
        guest = stack.enter_context(closing(network.open_probe_client(config, name)))
    greeting = _greet(config, book, guest) if guest else None
    _look_at_weights(config, book, guest, greeting)


def _look_at_machine(config: Config, book: Report) -> None:
    book.look("versions", lambda: machine.check_versions(*machine.this_python()))
    book.look("device", lambda: machine.check_device(config))
    battery = machine.has_battery()
    book.look("sleep", lambda: machine.check_sleep(
        machine.system(), machine.printed_by, on_battery=battery
    ))  # fmt: skip


def _check_run(config: Config) -> Check | None:
    """What lies in the run's folder can go on. Raises ConfigError for another run's settings."""
    folder = config.run_folder
    goes_on = earlier_config(config, folder) is not config
    return Check("run", True, f"goes on in {folder}") if goes_on else None


def _greet(config: Config, book: Report, guest: wire.ProbeClient) -> wire.ProbeReply | None:
    """The answer to our hello, when there is one of our run."""
    said: list[network.Answer] = []

    def hello() -> Check:
        said.append(network.say_hello(guest))
        return network.check_hello(said[0], config.run.name)

    if not book.look("hello", hello):
        return None
    answer = said[0]
    book.look("clock", lambda: network.check_clock(answer))
    book.look("burst", lambda: network.check_burst(guest))
    return answer.greeting


def _look_at_weights(
    config: Config, book: Report, guest: wire.ProbeClient | None, greeting: wire.ProbeReply | None
) -> None:
    folder, size = _folder_of(config), workload.model_bytes(config)
    if folder is None:
        return _look_at_address(config, book, size, greeting=greeting)
    if not _is_there(book, folder, "generator"):
        return None

    def show() -> tuple[str, str]:
        assert guest is not None
        try:
            answer, _ = guest.request("create_file", timeout=network.HELLO_SECONDS)
        except WireError as error:
            return "", str(error)
        return answer.created_file, answer.error

    if greeting is not None:
        poll_seconds = config.weights.poll_seconds
        _look_into(
            book, "visible", lambda: weights.check_visible(folder, show, poll_seconds=poll_seconds)
        )
    _look_into(book, "speed", lambda: weights.check_speed(folder, size))
    copies = config.run_folder / "copies"
    _look_into(book, "space", lambda: weights.check_space(copies, size, models=weights.MIN_COPIES))


def _look_at_address(
    config: Config, book: Report, size: int | None, *, greeting: wire.ProbeReply | None
) -> None:
    """Weights that lie behind a URL."""
    address, token = config.weights_address, config.weights.token_file
    port, run_id = config.weights.serve_port, greeting.run_id if greeting else ""
    if greeting and greeting.role == "doctor" and port and address.startswith("http://"):
        book.look("weights", lambda: weights.check_promised(address, token, port=port))
        return
    if _look_into(book, "weights", lambda: weights.check_address(address, token, run_id=run_id)):
        _look_into(book, "speed", lambda: weights.check_speed(address, size, token_file=token))


def _is_there(book: Report, folder: Path, role: str) -> bool:
    return _look_into(book, "weights", lambda: weights.check_there(folder, role=role))


def _look_into(book: Report, name: str, look: Look) -> bool:
    return book.look(name, look, seconds=FOLDER_SECONDS)


def _folder_of(config: Config) -> Path | None:
    """The weights folder; None when they lie behind a URL."""
    return None if "://" in config.weights_address else config.weights_folder
