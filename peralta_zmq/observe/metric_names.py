"""Names and meanings of all metrics (metric_names.toml); docs/metrics.md has `markdown()`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = Path(__file__).with_suffix(".toml").read_text("utf-8")
SECTIONS: Mapping[str, Mapping[str, str]] = tomllib.loads(_TABLE)
_PATTERNS = [
    (re.compile(re.escape(name).replace("NAME", "(.+)"), re.DOTALL), name, meaning)
    for names in SECTIONS.values()
    for name, meaning in names.items()
]


def meaning_of(key: str) -> tuple[str, str] | None:
    """The documented name of a metric and its meaning; None for one that a custom loss added."""
    exact = (entry[1:] for entry in _PATTERNS if entry[1] == key)
    matching = (entry[1:] for entry in _PATTERNS if entry[0].fullmatch(key))
    return next(exact, None) or next(matching, None)


def markdown() -> str:
    """All names and meanings in Markdown, one table for each section."""
    lines: list[str] = []
    for section, names in SECTIONS.items():
        lines += [f"## {section}", "", "| name | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in names.items()]
        lines.append("")
    return "\n".join(lines)
