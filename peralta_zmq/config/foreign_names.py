"""Error messages for unknown settings, with the setting that was probably meant.

foreign_names.toml lists the names that other training programs (TRL, prime-rl, ...) use for the
settings and sections of this one, and what replaces settings that this one had.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, cast

from peralta_zmq.errors import did_you_mean, nearest

Known: TypeAlias = Mapping[str, Mapping[str, object]]  # existing settings: section -> leaf -> type

# Tables "sections" and "settings": name in this program -> foreign names, separated by spaces;
# "explanations": what to do -> foreign names; "removed": former setting -> what replaces it.
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
REMOVED: Mapping[str, str] = NAMES["removed"]
# Former setting -> the setting that has taken it in. Older scripts still work.
MERGED = {
    "train.num_workers": "run.num_workers",
    "generator.num_workers": "run.num_workers",
    "task.reward_functions": "task.reward",
    "dashboard.enabled": "dashboard.port",
}


def with_present_names(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by section in which those of MERGED have their present names."""
    present: dict[str, object] = {
        section: {**content} if isinstance(content, Mapping) else content
        for section, content in settings.items()
    }
    if present.get("no_dashboard") == {"enabled": True}:  # --no-dashboard.enabled
        del present["no_dashboard"]
        present.setdefault("dashboard", {"enabled": False})
    for former, name in MERGED.items():
        section, _, leaf = former.partition(".")
        owner, _, target = name.partition(".")
        content = present.get(section)
        replaced = present.setdefault(owner, {})
        if not isinstance(content, dict) or leaf not in content or not isinstance(replaced, dict):
            continue
        value = content.pop(leaf)
        if former == "dashboard.enabled":
            if value in (True, "true", "True", "1"):
                continue
            value = None
        replaced.setdefault(target, value)
    return present


def unknown_setting(section: str, leaf: str, value: object, known: Known) -> str:
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
    if hint := removed_hint(section, leaf):
        return hint
    if section not in known:  # replace it by the section that was probably meant, "" if unclear
        section = FOREIGN_SECTIONS.get(section) or nearest(section, known)
    if leaf in known.get(section, {}):
        return f"did you mean {section}.{leaf}?"
    foreign = leaf.lower().replace("-", "_")
    if foreign in EXPLANATIONS:
        return EXPLANATIONS[foreign]
    owners = [f"[{name}]" for name, leaves in known.items() if leaf in leaves]
    right = RIGHT_NAMES.get(f"{section}.{foreign}")
    if right is None and owners:
        return f"'{leaf}' is a setting of {' and '.join(owners)} here"
    if right := right or RIGHT_NAMES.get(foreign):
        owner, _, name = right.partition(".")
        return f"'{leaf}' is called '{name}' here, in [{owner}]: write {right}"
    sections_by_leaf = {name: section for section, leaves in known.items() for name in leaves}
    if hint := did_you_mean(leaf, known.get(section, ()), f"{section}.{{}}"):
        return hint
    if choice := nearest(leaf, sections_by_leaf):
        return f"did you mean {sections_by_leaf[choice]}.{choice}?"
    if section:
        return f"the settings of [{section}] are {', '.join(known[section])}"
    return f"the sections are {', '.join(known)}"


def removed_hint(section: str, leaf: str) -> str:
    """What replaces a setting that this program had; '' for another name."""
    replacement = REMOVED.get(f"{section}.{leaf.replace('-', '_')}")
    return f"this setting was removed: {replacement}" if replacement else ""


def shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
