"""A whole run on this machine: one trainer and some generators under the supervisor.

Knows the doors' command lines and where a run keeps its files; knows nothing of models.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peralta_zmq.config import earlier_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.metrics import EVENTS, Events
from peralta_zmq.operate.process_group import BAD_CONFIG, Record, Worker, supervise
from tools.chaos import Chaos

if TYPE_CHECKING:
    from peralta_zmq.config import Config

BIN = Path(__file__).resolve().parents[2] / "bin"
WITNESSED = ("--log.level", "debug", "--checkpoint.keep-journal")  # what the checker reads


def main(config: Config) -> int:
    """`bin/lan local|chaos ARGUMENTS`: the workers get the same arguments."""
    command, *arguments = sys.argv[1:]
    return run_local(config, arguments, chaos=command == "chaos")


def run_local(config: Config, arguments: list[str], *, chaos: bool = False) -> int:
    """Train on this machine with the doors' `arguments`; returns an exit code.

    With `chaos` the trainer and every generator are killed on the way, and the code says whether
    anything was lost. Raises ConfigError when chaos has fewer than two generators to kill.
    """
    num_generators = config.run.num_local_generators
    if chaos and num_generators < 2:
        raise ConfigError(
            f"run.num_local_generators = {num_generators}, but in chaos one works while "
            "another is down; set it to 2 or more"
        )
    folder = config.run_folder
    earlier_config(config, folder)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run folder {folder} cannot be written ({error.strerror}); choose another --run.dir"
        ) from None
    workers = local_workers(
        folder, [*arguments, *(WITNESSED if chaos else ())], num_generators=num_generators
    )
    names = [each.name for each in workers]
    monkey = Chaos(folder, max_steps=config.train.max_steps, workers=names) if chaos else None
    code = supervise(workers, record=recorder(folder), look=monkey.look if monkey else None)
    if code == BAD_CONFIG and made:
        _clear(folder, made)
    return monkey.report() if monkey and code == 0 else code


def local_workers(folder: Path, arguments: Sequence[str], *, num_generators: int) -> list[Worker]:
    """The trainer first, then the generators; together they share the cores."""
    num_workers = str(num_generators + 1)
    trainer = (*_door("trainer"), *arguments, "--train.num-workers", num_workers)
    generators = [
        Worker(
            f"generator-{index}",
            (
                *_door("generator"),
                *arguments,
                *("--generator.index", str(index), "--generator.count", str(num_generators)),
                *("--generator.num-workers", num_workers, "--generator.name", f"local-{index}"),
            ),
            folder / "logs" / f"generator-{index}.log",
        )
        for index in range(num_generators)
    ]
    return [Worker("trainer", trainer), *generators]


def _door(name: str) -> tuple[str, str]:
    return sys.executable, str(BIN / name)


def recorder(folder: Path) -> Record:
    """What writes an event of the supervisor into the run's folder."""

    def record(event: str, **fields: object) -> None:
        try:
            with Events(folder / EVENTS) as events:
                events.record(event, **fields)
        except OSError as error:  # a full disk is no reason to stop the workers
            sys.stderr.write(f"{event} not recorded in {folder / EVENTS}: {error}\n")

    return record


def _clear(folder: Path, made: Sequence[Path]) -> None:
    """Refused settings leave nothing behind of what we made."""
    shutil.rmtree(folder / "logs")
    with contextlib.suppress(OSError):  # not empty: the trainer's own
        for each in made:
            each.rmdir()
