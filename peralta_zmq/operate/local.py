"""`bin/lan local`: a whole run on this machine, with one trainer and its generators."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peralta_zmq.config import earlier_config
from peralta_zmq.config.programs import program_command
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.process_group import BAD_CONFIG, ProcessGroup, Worker, recorder, supervise

if TYPE_CHECKING:
    from peralta_zmq.config import Config


def main(config: Config) -> int:
    """Run `bin/lan local ARGUMENTS`; every worker gets the same arguments."""
    return run_local(config, sys.argv[2:])


def run_local(
    config: Config,
    arguments: Sequence[str],
    *,
    on_tick: Callable[[ProcessGroup], None] | None = None,
) -> int:
    """Run the trainer and the generators with these command-line arguments; returns an exit code.

    `on_tick` is called 5 times a second, for tools that inject faults. If a worker rejects its
    settings, the folders that this call created are removed. Raises ConfigError if the run folder
    cannot be written or holds a run with other settings.
    """
    folder = config.run_folder
    earlier_config(config, folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run folder {folder} cannot be written ({error.strerror}); choose another --run.dir"
        ) from None
    workers = local_workers(folder, arguments, num_generators=config.run.num_local_generators)
    code = supervise(workers, record=recorder(folder), on_tick=on_tick)
    if code == BAD_CONFIG and created:
        shutil.rmtree(folder / "logs")
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for path in created:
                path.rmdir()
    return code


def local_workers(folder: Path, arguments: Sequence[str], *, num_generators: int) -> list[Worker]:
    """Commands of the trainer, which is first, and of the generators; they share the cores."""
    share = ("--train.num-workers", str(num_generators + 1))
    trainer = Worker("trainer", (*program_command("trainer"), *arguments, *share))
    return [trainer] + [
        Worker(
            f"generator-{index}",
            (
                *program_command("generator"),
                *arguments,
                *("--generator.index", str(index), "--generator.count", str(num_generators)),
                *("--generator.num-workers", str(num_generators + 1)),
                *("--generator.name", f"local-{index}"),
            ),
            folder / "logs" / f"generator-{index}.log",
        )
        for index in range(num_generators)
    ]
