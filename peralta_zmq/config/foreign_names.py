"""Error messages for unknown settings, with the setting that was probably meant.

A setting is written `section.leaf`, such as `train.learning_rate`. A foreign name is the name that
another training program (TRL, prime-rl, ...) uses for a setting or section; foreign_names.toml
lists the foreign names of each setting and section of this program.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias, cast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Known: TypeAlias = Mapping[str, Mapping[str, object]]  # existing settings: section -> leaf -> type

# Tables "sections" and "settings": name in this program -> foreign names, separated by spaces;
# table "explanations": what to do -> foreign names.
NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _by_foreign_name(names: Mapping[str, str]) -> dict[str, str]:
    """Invert one table of NAMES: return foreign name -> name in this program, or what to do."""
    return {foreign: name for name, aliases in names.items() for foreign in aliases.split()}


FOREIGN_SECTIONS = _by_foreign_name(NAMES["sections"])
# Setting of another program -> setting of this one. The key is its last name, alone or after the
# section of this program: "save_total_limit" or "checkpoint.keep" -> "checkpoint.keep_last".
RIGHT_NAMES = _by_foreign_name(NAMES["settings"])
# Setting of another program that no setting of this one replaces -> what to do.
EXPLANATIONS = _by_foreign_name(NAMES["explanations"])


def unknown_setting(section: str, leaf: str, value: object, known: Known) -> str:
    """Return the error message for a setting that does not exist."""
    hint = _hint(section, leaf, known)
    return f"unknown setting {section}.{leaf} = {shorten(value)}; {hint}"


def unknown_section(section: str, content: object, known: Known) -> str:
    """Return the error message for a top-level key that is not a section.

    `content` is the value of the key: a table, or the value of a setting without a section. For a
    table that is not empty, the message is about its first setting.
    """
    if not isinstance(content, Mapping):
        hint = _hint("", section, known)
        return f"unknown setting {section} = {shorten(content)}; {hint}"
    for leaf, value in cast("Mapping[str, object]", content).items():
        return unknown_setting(section, leaf, value, known)
    return f"unknown section [{section}]; the sections are {', '.join(known)}"


def _hint(section: str, leaf: str, known: Known) -> str:
    """Return the remedy: the setting that was probably meant, or the choices."""
    if section not in known:  # replace it by the section that was probably meant, "" if unclear
        matches = get_close_matches(section, known, n=1)
        section = FOREIGN_SECTIONS.get(section) or (matches[0] if matches else "")
    if leaf in known.get(section, {}):
        return f"did you mean {section}.{leaf}?"
    foreign = leaf.lower().replace("-", "_")
    if foreign in EXPLANATIONS:
        return EXPLANATIONS[foreign]
    if right := RIGHT_NAMES.get(f"{section}.{foreign}"):
        return _renamed(leaf, right)
    if owners := [f"[{name}]" for name, leaves in known.items() if leaf in leaves]:
        return f"'{leaf}' is a setting of {' and '.join(owners)} here"
    if right := RIGHT_NAMES.get(foreign):
        return _renamed(leaf, right)
    return _nearest(section, leaf, known)


def _renamed(leaf: str, right: str) -> str:
    """Return the hint for a foreign name whose setting is `right` (section.name)."""
    section, _, name = right.partition(".")
    return f"'{leaf}' is called '{name}' here, in [{section}]: write {right}"


def _nearest(section: str, leaf: str, known: Known) -> str:
    """Return the hint for a misspelt name; without a similar name, list the choices."""
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
