"""`bin/lan local`: a whole run on this machine, one trainer and its generators."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from peralta_zmq.config import RESOLVED, Config, check_memory_fractions, earlier_config
from peralta_zmq.config.programs import program_command
from peralta_zmq.errors import EXIT_ERROR, ConfigError, failure_text
from peralta_zmq.observe.metrics import EVENTS, METRICS
from peralta_zmq.operate import forks
from peralta_zmq.operate.process_group import ProcessGroup, Worker, recorder, supervise


def main(config: Config) -> int:
    """Run `bin/lan local ARGUMENTS`; `config` are the settings in the same arguments."""
    return run_local(config, sys.argv[2:])  # the arguments after `local`


def run_local(
    config: Config,
    arguments: Sequence[str],
    *,
    on_tick: Callable[[ProcessGroup], None] | None = None,
) -> int:
    """Run the trainer and the generators with these arguments; returns an exit code.

    `on_tick` is called 5 times a second, for tools that inject faults. If a worker ends with an
    error before the trainer has written any file, a new run folder is removed. Raises ConfigError
    if a new run folder cannot be written, or an existing one has other settings, and for fractions
    of the memory that are more than 1 together.
    """
    count = config.run.num_local_generators
    check_memory_fractions(config, has_trainer=True, num_generators=count, machine="this machine")
    folder, is_new = config.run_folder, False
    try:
        earlier_config(config, folder)  # raises ConfigError for other settings
        is_new = not folder.exists()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # An existing run starts anyway: its trainer waits for the folder, and the generators print
        # to the terminal.
        if is_new:
            raise ConfigError(
                f"run folder {folder} cannot be written ({failure_text(error)}); "
                "choose another --run.dir"
            ) from None
    workers = local_workers(config, arguments, can_fork=forks.import_libraries())
    num_bytes = 0  # size of metrics.jsonl, which has a line for each step of earlier sessions
    with contextlib.suppress(OSError):
        num_bytes = (folder / METRICS).stat().st_size
    code = supervise(
        workers,
        record=recorder(folder),
        on_tick=on_tick,
        has_trained=lambda: _has_trained(folder, num_bytes),
    )
    # A trainer that has accepted its settings writes them to the file RESOLVED.
    if code == EXIT_ERROR and is_new and not (folder / RESOLVED).exists():
        shutil.rmtree(folder / "logs")
        (folder / EVENTS).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            folder.rmdir()
    return code


def local_workers(
    config: Config, arguments: Sequence[str], *, can_fork: bool = False
) -> list[Worker]:
    """The trainer, which is first, and the generators; forks of this process if it `can_fork`.

    Each worker gets the number of workers that share the cores of this machine, or a higher one
    that the user has set.
    """

    def entry_point(program: str) -> str:
        return f"peralta_zmq.config.programs:{program}" if can_fork else ""

    count = config.run.num_local_generators
    share = ("--train.num-workers", str(max(count + 1, config.train.num_workers)))
    command = (*program_command("trainer"), *arguments, *share)
    workers = [Worker("trainer", command, main=entry_point("trainer"))]
    num_workers = str(max(count + 1, config.generator.num_workers))
    share = ("--generator.count", str(count), "--generator.num-workers", num_workers)
    for index in range(count):
        identity = ("--generator.index", str(index), "--generator.name", f"local-{index}")
        command = (*program_command("generator"), *arguments, *share, *identity)
        log = config.run_folder / "logs" / f"generator-{index}.log"
        workers.append(Worker(f"generator-{index}", command, log, entry_point("generator")))
    return workers


def _has_trained(folder: Path, num_bytes: int) -> bool:
    """True if metrics.jsonl is larger than `num_bytes`, or if its disk does not answer."""
    try:
        return (folder / METRICS).stat().st_size > num_bytes
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
