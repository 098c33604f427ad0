"""config.toml in a run folder, and the settings that a resumed run may change.

A run whose folder exists is resumed. At each start the trainer compares its settings with the
settings of the previous start of the run (`earlier_config`). Then the trainer writes all of its
settings into the run folder (`write_resolved`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    *("run.dir", "run.num_local_generators", "model.device", "engine.name"),
    *("run.report_to", "run.project", "run.report_name", "run.report_interval"),
    *("engine.tensor_parallel_size", "engine.gpu_memory_utilization", "engine.vllm_args"),
    *("curriculum.easy_fraction", "curriculum.hard_fraction", "curriculum.oversampling_factor"),
    *("task.reward_timeout", "task.reward_workers", "task.reward_concurrency"),
    *("train.num_workers", "train.max_mismatch_kl", "train.memory_fraction"),
    "train.on_mismatch",  # "drop" lets a run continue without a faulty generator
}
GROWING_SETTINGS = {"train.max_steps"}  # a resumed run may only increase them


def write_resolved(config: Config, folder: Path) -> None:
    """Write all settings to folder/config.toml, atomically.

    `load_config` can read the file. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.replace_file(folder / RESOLVED, toml_text(config).encode())


def load_resolved(program: str, folder: Path, settings: Sequence[str] = ()) -> Config:
    """Load config.toml in a run folder, changed by the command-line options `settings`.

    Raises ConfigError.
    """
    return load_config(program, ["@", str(folder / RESOLVED), *settings])


def earlier_config(config: Config, folder: Path) -> Config:
    """Return the settings of the last start of the run in `folder`.

    For a new run, returns `config` itself. Raises ConfigError if `config` changes a setting that
    a resumed run may not change, or if config.toml in `folder` is damaged; OSError if config.toml
    cannot be read for another reason.
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
    before, now = dict(_settings(earlier)), dict(_settings(config))
    changes = [
        f"{key} {shorten(before[key])} -> {shorten(now[key])}"
        for key in now
        if before[key] != now[key] and not _may_change(key, before[key], now[key], config)
    ]
    if changes:
        raise ConfigError(
            f"run folder {folder} was made with other settings: {', '.join(changes)}; {REMEDY}"
        )
    return earlier


def toml_text(config: Config) -> str:
    """Return all settings as TOML, with "None" for None: TOML has no null."""
    return tomli_w.dumps(_without_null(config.model_dump()))


def _without_null(value: Any) -> Any:
    """Replace None by "None" in nested tables and lists.

    Leaves out every empty `env` (no [[env]], no [[eval.env]]).
    """
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {k: _without_null(v) for k, v in table.items() if not (k == "env" and not v)}
    if isinstance(value, (list, tuple)):
        return [_without_null(entry) for entry in cast("list[Any]", value)]
    return "None" if value is None else value


def _settings(config: Config) -> Iterator[tuple[str, object]]:
    """Yield (section.leaf, value) of all settings.

    Settings of [[env]] that a resumed run may change are replaced by None.
    """
    free = {"address": None, "rollouts_per_example": None, "eval_sampling": None}
    yield "env", tuple(env.model_copy(update=free) for env in config.env)
    for name, section in config:
        if name != "env":
            for leaf, value in section:
                yield f"{name}.{leaf}", value


def _may_change(key: str, before: Any, now: Any, config: Config) -> bool:
    """Whether a resumed run may change the setting `key` from `before` to `now`."""
    if key in GROWING_SETTINGS:
        # A temperature schedule ends at max_steps. If max_steps changed, the trainer would compute
        # logprobs of groups in flight at other temperatures than those that sampled the groups.
        return now > before and config.sampling.temp_scheduler is None
    return key in FREE_SETTINGS or key.partition(".")[0] in FREE_SECTIONS
