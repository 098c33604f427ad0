"""Errors for unknown settings, with a hint: the nearest name, or our name for a foreign one.

A foreign name is the name of a setting in another training program; foreign_names.toml lists these.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias, cast

from peralta_zmq.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Known: TypeAlias = Mapping[str, Mapping[str, object]]  # section -> setting (leaf) -> type

NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _by_foreign_name(names: Mapping[str, str]) -> dict[str, str]:
    return {foreign: name for name, aliases in names.items() for foreign in aliases.split()}


FOREIGN_SECTIONS = _by_foreign_name(NAMES["sections"])
RIGHT_NAMES = _by_foreign_name(NAMES["settings"])


def refuse_unknown_settings(settings: Mapping[str, object], known: Known) -> None:
    """Raise ConfigError for the first unknown section or setting."""
    for section, content in settings.items():
        if section == "env" and isinstance(content, (list, tuple)):
            continue  # [[env]] is a setting of ours; only [env] is a foreign name, for [task]
        if section not in known:
            raise ConfigError(_unknown_section(section, content, known))
        if isinstance(content, Mapping):
            _refuse_unknown_leaves(section, cast("Mapping[str, object]", content), known)
        elif not hasattr(
            content, "model_fields_set"
        ):  # a Section object, passed by Python code, has it
            raise ConfigError(
                f"'{section}' is a section, not a setting ({section} = {shorten(content)}); "
                f"its settings: {', '.join(known[section])}"
            )


def refuse_unknown_rows(
    settings: Mapping[str, object], known: Known, *, leaves: Sequence[str]
) -> None:
    """Raise ConfigError for the first setting in [[env]] or [[eval.env]] not in `leaves`."""
    evaluation = settings.get("eval")
    tables = {"env": settings.get("env")}
    if isinstance(evaluation, Mapping):
        tables["eval.env"] = cast("Mapping[str, object]", evaluation).get("env")
    for option, rows in tables.items():
        for row in cast("list[object]", rows) if isinstance(rows, list) else []:
            for leaf in cast("Mapping[str, object]", row) if isinstance(row, Mapping) else ():
                if leaf not in leaves:
                    matches = get_close_matches(leaf, leaves, n=1)
                    hint = f"did you mean {matches[0]}?" if matches else right_name("", leaf, known)
                    raise ConfigError(f"unknown setting {leaf} in [[{option}]]; {hint}")


def _refuse_unknown_leaves(section: str, content: Mapping[str, object], known: Known) -> None:
    for leaf, value in content.items():
        if leaf not in known[section]:
            hint = right_name(section, leaf, known)
            raise ConfigError(f"unknown setting {section}.{leaf} = {shorten(value)}; {hint}")
        if isinstance(value, bool) and known[section][leaf] is not bool:
            raise ConfigError(  # pydantic would read true as the number 1
                f"{section}.{leaf} = {shorten(value)} is not a number or text; "
                "set a value, or leave it out for the default"
            )


def _unknown_section(section: str, content: object, known: Known) -> str:
    if not isinstance(content, Mapping):
        hint = right_name("", section, known)
        return f"unknown setting {section} = {shorten(content)}; {hint}"
    for leaf, value in cast("Mapping[str, object]", content).items():
        hint = right_name(section, leaf, known)
        return f"unknown setting {section}.{leaf} = {shorten(value)}; {hint}"
    return f"unknown section [{section}]; the sections are {', '.join(known)}"


def right_name(section: str, leaf: str, known: Known) -> str:
    """Return a hint, for the end of an error message, with the right name of a setting."""
    if section not in known:
        matches = get_close_matches(section, known, n=1)
        section = FOREIGN_SECTIONS.get(section) or (matches[0] if matches else "")
    if leaf in known.get(section, {}):
        return f"did you mean {section}.{leaf}?"
    foreign = leaf.lower().replace("-", "_")
    if right := RIGHT_NAMES.get(f"{section}.{foreign}"):
        return _renamed(leaf, right)
    if owners := [f"[{name}]" for name, leaves in known.items() if leaf in leaves]:
        return f"'{leaf}' is a setting of {' and '.join(owners)} here"
    if right := RIGHT_NAMES.get(foreign):
        return _renamed(leaf, right)
    return _nearest(section, leaf, known)


def _renamed(leaf: str, right: str) -> str:
    section, _, name = right.partition(".")
    return f"'{leaf}' is called '{name}' here, in [{section}]: write {right}"


def _nearest(section: str, leaf: str, known: Known) -> str:
    sections_by_leaf = {name: section for section, leaves in known.items() for name in leaves}
    if matches := get_close_matches(leaf, known.get(section, ()), n=1):
        return f"did you mean {section}.{matches[0]}?"
    if matches := get_close_matches(leaf, sections_by_leaf, n=1):
        return f"did you mean {sections_by_leaf[matches[0]]}.{matches[0]}?"
    if section:
        return f"the settings of [{section}] are {', '.join(known[section])}"
    return f"the sections are {', '.join(known)}"


def shorten(value: object) -> str:
    """Return the repr of a value, cut to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
