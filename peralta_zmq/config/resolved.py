"""The settings a run was made with, kept in its folder, and what may change between two starts.

Knows TOML and one file, config.toml; knows nothing else of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from peralta_zmq import atomic_files
from peralta_zmq.config.load import load_config
from peralta_zmq.config.names import shown
from peralta_zmq.config.section import Section, rows_of
from peralta_zmq.config.settings import Config
from peralta_zmq.errors import ConfigError

RESOLVED = "config.toml"
WAYS_ON = "choose another --run.name, or delete the folder to start anew (FRESH=1 make run)"

# What only says where and how long, not what is learned: free to change when a run goes on.
FREE_SECTIONS = {"checkpoint", "dashboard", "eval", "generator", "log", "security", "verifier",
                 "weights", "wire"}  # fmt: skip
FREE_SETTINGS = {
    "curriculum.easy_fraction",
    "curriculum.hard_fraction",
    "curriculum.oversampling_factor",
    "model.device",
    "run.dir",
    "run.num_local_generators",
    "run.report_to",
    "task.reward_timeout",
    "train.max_mismatch_kl",
    "train.on_mismatch",  # what a person sets after a warning, to go on without a worker
    "train.num_workers",
}
GROWING_SETTINGS = {"train.max_steps"}


def write_resolved(config: Config, folder: Path) -> None:
    """Write every setting to folder/config.toml, whole; `load_config` reads it back.

    Raises ConfigError when the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_file(folder / RESOLVED, toml_text(config).encode())
    except OSError as error:
        raise ConfigError(
            f"run folder {folder} cannot be written ({error.strerror}); choose another --run.dir"
        ) from None


def earlier_config(config: Config, folder: Path) -> Config:
    """The settings of the session before in `folder`, or `config` itself for a new run.

    Raises ConfigError when they are of another run.
    """
    if not (folder / RESOLVED).exists():
        return config
    earlier = _read(folder)
    before, now = dict(_settings(earlier)), dict(_settings(config))
    changes = [
        f"{key} {shown(before[key])} -> {shown(now[key])}"
        for key in now
        if before[key] != now[key] and not _may_change(key, before[key], now[key], config)
    ]
    if changes:
        raise ConfigError(
            f"run folder {folder} was made with other settings: {', '.join(changes)}; {WAYS_ON}"
        )
    return earlier


def toml_text(config: Config) -> str:
    """The whole config as TOML; None is written as "None", which is read as None."""
    tables: list[tuple[str, Section]] = [("[[env]]", each) for each in config.env]
    for name, section in _sections(config):
        tables.append((f"[{name}]", section))
        tables += [("[[eval.env]]", each) for each in config.eval.env if name == "eval"]
    return "\n\n".join("\n".join([head, *_lines(table)]) for head, table in tables) + "\n"


def _lines(table: Section) -> Iterator[str]:
    for leaf, setting in table:
        if not rows_of(type(table).model_fields[leaf]):
            yield f"{leaf} = {_toml(setting)}"


def _read(folder: Path) -> Config:
    path = folder / RESOLVED
    try:
        return load_config("config", ["@", str(path)])
    except ConfigError as error:
        raise ConfigError(
            f"run folder {folder} cannot be continued, its {RESOLVED} does not load "
            f"({error}); {WAYS_ON}"
        ) from None


def _sections(config: Config) -> Iterator[tuple[str, Section]]:
    for name, section in config:
        if name != "env":
            assert isinstance(section, Section)
            yield name, section


def _settings(config: Config) -> Iterator[tuple[str, object]]:
    yield "env", tuple(each.model_copy(update={"address": None}) for each in config.env)
    for name, section in _sections(config):
        for leaf, setting in section:
            yield f"{name}.{leaf}", setting


def _may_change(key: str, before: object, now: object, config: Config) -> bool:
    if key in GROWING_SETTINGS:
        assert isinstance(before, int) and isinstance(now, int)
        # groups under way were sampled at the temperatures of the shorter course
        return now > before and config.sampling.temp_scheduler is None
    return key in FREE_SETTINGS or key.partition(".")[0] in FREE_SECTIONS


def _toml(setting: object) -> str:
    if isinstance(setting, Section):
        setting = setting.model_dump()
    if isinstance(setting, dict):
        table = cast("dict[str, object]", setting)
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in table.items()) + "}"
    if isinstance(setting, list):
        return "[" + ", ".join(map(_toml, cast("list[object]", setting))) + "]"
    if isinstance(setting, bool):
        return str(setting).lower()
    if isinstance(setting, (int, float)):
        return repr(setting)
    if isinstance(setting, tuple):
        return f"[{', '.join(map(_toml, cast('tuple[object, ...]', setting)))}]"
    # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
    return json.dumps(str(setting), ensure_ascii=False).replace("\x7f", "\\u007F")
