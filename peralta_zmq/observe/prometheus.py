"""Newest metrics of runs in the Prometheus text format 0.0.4.

`a/b` becomes peralta_a_b; the name of a generator or reward becomes a label. All metrics are gauges
except the cumulative counts, whose names end in _total.
Source: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from peralta_zmq.observe.metric_names import meaning_of
from peralta_zmq.observe.metrics import number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELLED = (
    (re.compile(r"gen/(?P<label>.+)/(?P<kind>[^/]+)", re.DOTALL), "generator", "gen"),
    (re.compile(r"rewards/(?P<label>.+)/(?P<kind>[^/]+)", re.DOTALL), "reward", "rewards"),
)
COUNTER_PREFIX = "dropped/"  # cumulative since the run began


def exposition(rows: Mapping[str, Mapping[str, object]]) -> str:
    """All finite numbers of `rows` (run name -> newest row), each labelled with its run.

    If two keys yield the same name and labels, the first one counts.
    """
    heads: dict[str, str] = {}  # by name
    samples: dict[str, dict[str, str]] = {}  # by name: name and labels -> line
    for run, row in rows.items():
        for key in row:
            if math.isnan(value := number(row, key)):
                continue
            name, labels = _name(key)
            text = ",".join(f'{k}="{_escape(v)}"' for k, v in {"run": run, **labels}.items())
            heads.setdefault(name, _head(name, key))
            lines = samples.setdefault(name, {})
            lines.setdefault(text, f"{name}{{{text}}} {value!r}\n")
    return "".join(head + "".join(samples[name].values()) for name, head in heads.items())


def _name(key: str) -> tuple[str, dict[str, str]]:
    for pattern, label, prefix in LABELLED:
        if match := pattern.fullmatch(key):
            return _legal(f"{prefix}/{match['kind']}"), {label: match["label"]}
    return _legal(f"{key}/total" if key.startswith(COUNTER_PREFIX) else key), {}


def _legal(key: str) -> str:
    return "peralta_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _head(name: str, key: str) -> str:
    known = meaning_of(key)
    meaning = known[1] if known else "a metric added by the loss"
    kind = "counter" if key.startswith(COUNTER_PREFIX) else "gauge"
    return f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
