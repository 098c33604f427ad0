"""`bin/lan local`: a whole run on this machine, one trainer and its generators."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence

from peralta_zmq.config import RESOLVED, Config, check_memory_fractions, earlier_config
from peralta_zmq.config.programs import program_command
from peralta_zmq.errors import EXIT_ERROR, ConfigError, failure_text
from peralta_zmq.observe.metrics import EVENTS, METRICS
from peralta_zmq.operate.process_group import (
    DEFAULT_POLICY,
    ProcessGroup,
    RestartPolicy,
    Worker,
    recorder,
    supervise,
)


def main(config: Config) -> int:
    return run_local(config, sys.argv[2:])  # the arguments after `local`


def run_local(
    config: Config,
    arguments: Sequence[str],
    *,
    on_tick: Callable[[ProcessGroup], None] | None = None,
    policy: RestartPolicy = DEFAULT_POLICY,
) -> int:
    """Run the trainer and the generators with these arguments; returns an exit code.

    `on_tick` is for tools that inject faults. If a worker ends with an error before the trainer has
    written any file, a new run folder is removed. Raises ConfigError if the folder cannot be
    written or an existing one has other settings, or if the workers would need more than the
    memory.
    """
    count = config.run.num_local_generators
    check_memory_fractions(config, has_trainer=True, num_generators=count, machine="this machine")
    folder = config.run_folder
    is_new = False
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
    num_bytes = 0  # size of metrics.jsonl, which has a line for each step of earlier sessions
    with contextlib.suppress(OSError):
        num_bytes = (folder / METRICS).stat().st_size

    def has_trained() -> bool:
        try:
            return (folder / METRICS).stat().st_size > num_bytes
        except OSError as error:
            return not isinstance(error, FileNotFoundError)  # the disk does not answer

    code = supervise(
        local_workers(config, arguments),
        record=recorder(folder),
        on_tick=on_tick,
        has_trained=has_trained,
        policy=policy,
    )
    # A trainer that has accepted its settings writes them to the file RESOLVED.
    if code == EXIT_ERROR and is_new and not (folder / RESOLVED).exists():
        shutil.rmtree(folder / "logs")
        (folder / EVENTS).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            folder.rmdir()
    return code


def local_workers(config: Config, arguments: Sequence[str]) -> list[Worker]:
    """The trainer, which is first, and the generators, which share the cores of this machine."""
    count = config.run.num_local_generators
    share = ("--run.num-workers", str(max(count + 1, config.run.num_workers)))
    command = (*program_command("trainer"), *arguments, *share)
    workers = [Worker("trainer", command)]
    for index in range(count):
        name = ("--generator.name", f"local-{index}")
        command = (*program_command("generator"), *arguments, *name, *share)
        log = config.run_folder / "logs" / f"generator-{index}.log"
        workers.append(Worker(f"generator-{index}", command, log))
    return workers
