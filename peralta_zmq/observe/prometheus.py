"""Documented metric names, and export of the newest metrics to Prometheus.

metric_names.toml has the name and meaning of every metric in metrics.jsonl, as has docs/metrics.md.
The export is the text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats): metric
`a/b` becomes peralta_a_b, and the name of a generator or reward becomes a label. All metrics are
gauges except the cumulative counts, whose names end in _total.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from peralta_zmq.errors import printable
from peralta_zmq.observe.metrics import number, read_toml

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = {"gen": "generator", "rewards": "reward"}  # first part of a metric name -> label
LABELLED = re.compile(r"(gen|rewards)/(.+)/([^/]+)", re.DOTALL)
COUNTER_PREFIX = "dropped/"  # cumulative since the run began

# section of docs/metrics.md -> documented name -> meaning
SECTIONS: Mapping[str, Mapping[str, str]] = read_toml(Path(__file__).with_name("metric_names.toml"))
MEANINGS = {name: meaning for names in SECTIONS.values() for name, meaning in names.items()}
PATTERNS = {
    name: re.compile(re.escape(name).replace("NAME", "(.+)"), re.DOTALL) for name in MEANINGS
}


def documented_name(key: str) -> str | None:
    """Name in MEANINGS of a metric; None for a metric that a custom loss added."""
    if key in MEANINGS:
        return key
    return next((name for name, pattern in PATTERNS.items() if pattern.fullmatch(key)), None)


def exposition(rows: Mapping[str, Mapping[str, object]]) -> str:
    """Format all finite numbers of `rows` (run name -> newest row), each labelled with its run.

    If two keys become the same name and labels, the first one counts.
    """
    # Prometheus name -> labels -> sample line; "" -> HELP and TYPE lines
    families: dict[str, dict[str, str]] = {}
    for run, row in rows.items():
        for key in row:
            if math.isnan(value := number(row, key)):
                continue
            name, labels = _name_and_labels(key)
            text = ",".join(f'{k}="{_escape(v)}"' for k, v in {"run": run, **labels}.items())
            family = families.setdefault(name, {"": _head(name, key)})
            family.setdefault(text, f"{name}{{{text}}} {value!r}\n")
    return "".join(line for family in families.values() for line in family.values())


def _name_and_labels(key: str) -> tuple[str, dict[str, str]]:
    labels: dict[str, str] = {}
    if match := LABELLED.fullmatch(key):
        prefix, label, metric = match.groups()
        key, labels = f"{prefix}/{metric}", {LABELS[prefix]: label}
    suffix = "_total" if key.startswith(COUNTER_PREFIX) else ""
    return "peralta_" + re.sub(r"[^a-zA-Z0-9_]", "_", key) + suffix, labels


def _head(name: str, key: str) -> str:
    documented = documented_name(key)
    meaning = MEANINGS[documented] if documented else "a metric added by the loss"
    kind = "counter" if key.startswith(COUNTER_PREFIX) else "gauge"
    return f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n"


def _escape(text: str) -> str:
    text = printable(text, keep="\n").replace("\\", "\\\\")
    return text.replace("\n", "\\n").replace('"', '\\"')
