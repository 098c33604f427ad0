"""Documented metric names, and export of the newest metrics to Prometheus.

The text format 0.0.4 is documented at prometheus.io/docs/instrumenting/exposition_formats. Metric
`a/b` becomes peralta_a_b, and the name of a generator or reward becomes a label.
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
COUNTER_PREFIX = "dropped/"  # cumulative; dropped/invalid since the trainer's last start

# section of docs/metrics.md -> documented name -> meaning
SECTIONS: Mapping[str, Mapping[str, str]] = read_toml(Path(__file__).with_name("metric_names.toml"))
MEANINGS = {name: meaning for names in SECTIONS.values() for name, meaning in names.items()}
# Documented name -> pattern; NAME stands for any generator, reward, ...
PATTERNS = {
    name: re.compile(re.escape(name).replace("NAME", "(.+)"), re.DOTALL) for name in MEANINGS
}


def documented_name(key: str) -> str | None:
    """A metric's name in MEANINGS, such as gen/NAME/step; None for one that custom code added."""
    if key in MEANINGS:
        return key
    return next((name for name, pattern in PATTERNS.items() if pattern.fullmatch(key)), None)


def exposition(rows: Mapping[str, Mapping[str, object]]) -> str:
    """Format all finite numbers of `rows` (run name -> newest row of metrics.jsonl).

    If two metrics of a row get the same Prometheus name and labels, only the first is exported.
    """
    # Prometheus name -> labels -> line with the number; the key "" has the HELP and TYPE lines.
    families: dict[str, dict[str, str]] = {}
    for run, row in rows.items():
        for key in row:
            if math.isnan(value := number(row, key)):  # NaN also if infinite or not a number
                continue
            name, labels = _name_and_labels(key)
            label_text = ",".join(f'{k}="{_escape(v)}"' for k, v in {"run": run, **labels}.items())
            family = families.setdefault(name, {"": _help_and_type(name, key)})
            # setdefault keeps the first metric with these labels.
            family.setdefault(label_text, f"{name}{{{label_text}}} {value!r}\n")
    return "".join(line for family in families.values() for line in family.values())


def _name_and_labels(key: str) -> tuple[str, dict[str, str]]:
    labels: dict[str, str] = {}
    if match := LABELLED.fullmatch(key):
        prefix, label, metric = match.groups()
        key = f"{prefix}/{metric}"
        labels = {LABELS[prefix]: label}
    suffix = "_total" if key.startswith(COUNTER_PREFIX) else ""
    return "peralta_" + re.sub(r"[^a-zA-Z0-9_]", "_", key) + suffix, labels


def _help_and_type(name: str, key: str) -> str:
    documented = documented_name(key)
    meaning = MEANINGS[documented] if documented else "a metric added by the loss"
    kind = "counter" if key.startswith(COUNTER_PREFIX) else "gauge"
    return f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n"


def _escape(text: str) -> str:
    text = printable(text, keep="\n").replace("\\", "\\\\")
    return text.replace("\n", "\\n").replace('"', '\\"')
