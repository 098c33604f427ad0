"""config.toml in a run folder, and the settings that a resumed run may change.

At each start the trainer compares its settings with those of the previous start of the run
(`earlier_config`), and writes them into the run folder (`write_resolved`). The settings before a
change are in config_history.jsonl (observe/run_log.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import tomli_w

from peralta_zmq import atomic_files
from peralta_zmq.config.foreign_names import shorten
from peralta_zmq.config.load import load_config
from peralta_zmq.config.schema import Config
from peralta_zmq.errors import ConfigError

RESOLVED = "config.toml"  # name of the file in the run folder
REMEDY = "choose another --run.name, or delete the folder to start again (FRESH=1 make run)"

# Settings that a resumed run may change. Most of them do not influence the training result; the
# others are meant to be changed during a run, or limit time and memory.
FREE_SECTIONS = {
    *("checkpoint", "dashboard", "early_stop", "eval", "generator", "log"),
    *("security", "verifier", "weights", "wire"),
}
FREE_SETTINGS = {
    *("run.dir", "run.num_local_generators", "run.num_workers", "model.device", "engine.name"),
    *("run.fork", "run.from_step", "run.fork_optimizer"),  # without effect on an existing run
    *("run.report_to", "engine.gpu_memory_utilization", "engine.vllm_args"),
    *("task.reward_timeout", "task.reward_workers"),
    *("train.memory_fraction", "train.samples_while_waiting"),
    # The journal has the numbers that each step was trained with.
    *("train.learning_rate", "train.lr_scheduler_type", "train.warmup_steps", "train.max_steps"),
    *("train.weight_decay", "train.max_grad_norm"),
}
# Settings whose defaults follow the model, the data and the machine (build/fitted_settings.py).
FITTED = (
    "train.learning_rate",
    "train.batch_size",
    "train.max_tokens_per_microbatch",
    "sampling.max_completion_length",
    "engine.max_model_len",
    "eval.interval",
)


def write_resolved(config: Config, folder: Path) -> None:
    """Write all settings to folder/config.toml. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.replace_file(folder / RESOLVED, toml_text(config).encode())


def load_resolved(program: str, folder: Path, settings: Sequence[str] = ()) -> Config:
    """Load config.toml in a run folder, changed by options. Raises ConfigError."""
    return load_config(program, ["@", str(folder / RESOLVED), *settings])


def earlier_config(config: Config, folder: Path) -> Config:
    """The settings of the last start of the run in `folder`; for a new run, `config`.

    Raises ConfigError if `config` changes a setting that a resumed run may not change, or if
    config.toml is damaged; OSError if it cannot be read.
    """
    try:
        (folder / RESOLVED).read_bytes()  # `load_config` would raise ConfigError for an OSError
    except (FileNotFoundError, NotADirectoryError):
        return config
    try:
        earlier = load_resolved("config", folder)
    except ConfigError as error:
        raise ConfigError(
            f"run folder {folder} cannot be resumed, its {RESOLVED} does not load "
            f"({error}); {REMEDY}"
        ) from None
    fork = (config.run.fork, config.run.from_step)
    if config.run.fork is not None and fork != (earlier.run.fork, earlier.run.from_step):
        raise ConfigError(
            f"run folder {folder} exists already, and run.fork {config.run.fork} makes a new run; "
            f"choose another name: --run.name {_free_name(folder)}"
        )
    refused = [
        change
        for key, change in changed_settings(earlier, _with_fitted(config, earlier)).items()
        if key not in FREE_SETTINGS and key.partition(".")[0] not in FREE_SECTIONS
    ]
    if refused:
        raise ConfigError(
            f"run folder {folder} was made with other settings: {', '.join(refused)}; to continue "
            "from its weights with these settings, add to the command: "
            f"--run.fork {config.run.name} --run.name {_free_name(folder)}; "
            "or delete the folder to start again (FRESH=1 make run)"
        )
    return earlier


def keep_fork(config: Config, earlier: Config) -> Config:
    """`config`, as a fork of the same step as at the earlier start, if it names no fork."""
    if config.run.fork is not None or earlier.run.fork is None:
        return config
    names = ("run.fork", "run.from_step", "run.fork_optimizer")
    return with_settings(config, {name: attrgetter(name)(earlier) for name in names})


def changed_settings(before: Config, now: Config) -> dict[str, str]:
    """The settings that differ: section.leaf -> text with the value before and now."""
    values = dict(_settings(before))
    return {
        key: f"{key} {shorten(values[key])} -> {shorten(value)}"
        for key, value in _settings(now)
        if values[key] != value
    }


def _free_name(folder: Path) -> str:
    names = (f"{folder.name}-{number}" for number in count(2))
    return next(name for name in names if not folder.with_name(name).exists())


def is_set(config: Config, name: str) -> bool:
    """Whether the user has set section.leaf, in a file or as an option."""
    section, _, leaf = name.partition(".")
    return leaf in getattr(config, section).model_fields_set


def with_settings(config: Config, values: Mapping[str, object]) -> Config:
    """The settings with other values of some section.leaf, which then are set.

    Raises ConfigError, or ValueError for a value that is out of bounds.
    """
    given = config.model_dump(exclude_unset=True)
    for name, value in values.items():
        section, _, leaf = name.partition(".")
        given.setdefault(section, {})[leaf] = value
    return Config.model_validate(given)


def with_fitted_of_run(config: Config) -> Config:
    """The settings, with FITTED ones that the user leaves out as in the run folder.

    Raises OSError if config.toml cannot be read; `earlier_config` reports a damaged one.
    """
    folder = config.run_folder
    try:
        (folder / RESOLVED).read_bytes()
        return _with_fitted(config, load_resolved("config", folder))
    except (FileNotFoundError, NotADirectoryError, ConfigError):
        return config


def _with_fitted(config: Config, earlier: Config) -> Config:
    unset = [name for name in FITTED if not is_set(config, name)]
    return with_settings(config, {name: attrgetter(name)(earlier) for name in unset})


def toml_text(config: Config) -> str:
    """All settings as TOML, with "None" for None: TOML has no null."""
    return tomli_w.dumps(_without_null(config.model_dump()))


def _without_null(value: Any) -> Any:
    """Replace None by "None" in nested tables and lists, and leave out an empty `env`."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {k: _without_null(v) for k, v in table.items() if not (k == "env" and not v)}
    if isinstance(value, (list, tuple)):
        return [_without_null(entry) for entry in cast("list[Any]", value)]
    return "None" if value is None else value


def _settings(config: Config) -> Iterator[tuple[str, object]]:
    """Yield (section.leaf, value); None for what a resumed run may change of an [[env]]."""
    free = {"address": None, "rollouts_per_example": None, "eval_sampling": None}
    yield "env", tuple(env.model_copy(update=free) for env in config.env)
    for name, section in config:
        if name != "env":
            for leaf, value in section:
                is_implied = name == "loss" and leaf not in {"name", *section.model_fields_set}
                yield f"{name}.{leaf}", None if is_implied else value
