"""A generator on the trainer's machine, which samples while the trainer waits for rollouts.

It is a generator like any other, with all cores and the lowest priority: it gets those that the
trainer leaves idle. It ends with the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from peralta_zmq import models
from peralta_zmq.addresses import is_loopback
from peralta_zmq.config import RESOLVED, Config, programs
from peralta_zmq.errors import failure_text
from peralta_zmq.wire.rollout_sockets import interface_address

NAME = "own"
PROGRAM = "from peralta_zmq.trainer.own_generator import main; main()"
logger = logging.getLogger(__name__)


def is_wanted(config: Config) -> bool:
    """Whether this machine may sample: train.samples_while_waiting, or the defaults for `auto`.

    A machine that generators share has no idle cores, and on a GPU two processes would compute in
    turns. With a loopback address all generators are on this machine.
    """
    choice = config.train.samples_while_waiting
    if choice != "auto":
        return choice == "always"
    is_shared = config.run.num_workers > 1 or is_loopback(config.wire.bind)
    keys = config.keys_folder
    has_key = keys is None or (keys / f"{NAME}.secret").exists()
    return not is_shared and has_key and models.choose_device(config.model.device).type == "cpu"


class OwnGenerator:
    """Starts the generator when the trainer has waited half of its time and `min_seconds` or more.

    The time before the end of the first step does not count: generators may still start. A
    generator that fails is started again, `max_starts` times in all. Use with `closing`.
    """

    def __init__(
        self, config: Config, folder: Path, *, min_seconds: float = 60.0, max_starts: int = 3
    ) -> None:
        self._config = config
        self._folder = folder
        self._min_seconds = min_seconds
        # Seconds of the steps after the first one; None before the end of the first one.
        self._seconds: float | None = None
        self._waited = 0.0  # the part of them spent waiting
        self._starts_left = max_starts if is_wanted(config) else 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def record(self, *, waited: float, seconds: float) -> None:
        """Record a step of the trainer."""
        if self._seconds is None:
            self._seconds = 0.0
            return
        self._seconds += seconds
        self._waited += waited
        self.poll(0.0)

    def poll(self, waiting: float) -> None:
        """Start the generator if it is time; `waiting`: seconds waited in the step in progress."""
        if self._seconds is None:
            return
        if self._process is not None and (code := self._process.poll()) is not None:
            logger.warning("the trainer's own generator has ended: exit code %d", code)
            self.close()
            self._seconds = 0.0
            self._waited = 0.0
        waited = self._waited + waiting
        is_waiting = waited >= max(self._min_seconds, 0.5 * (self._seconds + waiting))
        if self._process is None and is_waiting and self._starts_left:
            self._start()

    def _start(self) -> None:
        bind = interface_address(self._config.wire.bind)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
        log = self._folder / "logs" / f"generator-{NAME}.log"
        words = ["@", str(self._folder / RESOLVED), "--wire.host", host, "--generator.name", NAME]
        self._starts_left -= 1
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *words],
                    stdin=subprocess.PIPE,  # ends when the trainer does
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
        except OSError as error:
            logger.warning("cannot start the trainer's own generator: %s", failure_text(error))
            return
        logger.info("the trainer waits for rollouts: it samples, too (%s)", log)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    """The program of the process."""

    def end_with_trainer() -> None:
        os.read(0, 1)  # sys.stdin would have a lock, which the interpreter needs at its end
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()
    os.nice(19)
    # Linux shares cores between sessions first: a session has a priority, too.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    sys.exit(programs.generator())
