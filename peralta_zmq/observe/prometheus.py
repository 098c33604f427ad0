"""The newest rows of runs in Prometheus' text format 0.0.4.

Knows rows and the format; knows nothing of servers. `a/b` is called peralta_a_b; what a name says
of a generator or of a reward becomes a label. All are gauges but the counts since the beginning,
whose names end in _total.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from peralta_zmq.observe.metric_names import meaning_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELLED = (
    (re.compile(r"gen/(?P<label>.+)/(?P<kind>[^/]+)", re.DOTALL), "generator", "gen"),
    (re.compile(r"rewards/(?P<label>.+)/(?P<kind>[^/]+)", re.DOTALL), "reward", "rewards"),
)
COUNTS = ("dropped/",)  # since the run began
OWN = "a metric of the loss's own"


def exposition(rows: Mapping[str, Mapping[str, object]]) -> str:
    """Every number of these rows as a sample labelled with its run, the key of the row.

    What is null or text is left out.

    Source: prometheus.io/docs/instrumenting/exposition_formats.
    """
    families: dict[str, tuple[str, dict[str, str]]] = {}  # name -> key of its meaning, samples
    for run, key, value in ((run, *field) for run, row in rows.items() for field in row.items()):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        name, labels = _named(key)
        shown = "".join(f',{label}="{_escaped(text)}"' for label, text in labels.items())
        sample = f'{name}{{run="{_escaped(run)}"{shown}}}'
        families.setdefault(name, (key, {}))[1].setdefault(sample, _number(float(value)))
    return "".join(_family(name, key, samples) for name, (key, samples) in families.items())


def _named(key: str) -> tuple[str, dict[str, str]]:
    for pattern, label, room in LABELLED:
        if found := pattern.fullmatch(key):
            return _plain(f"{room}/{found['kind']}"), {label: found["label"]}
    return _plain(f"{key}/total" if key.startswith(COUNTS) else key), {}


def _plain(key: str) -> str:
    """A metric name has letters of ASCII, digits and underscores only."""
    return "peralta_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _family(name: str, key: str, samples: Mapping[str, str]) -> str:
    found = meaning_of(key)
    kind = "counter" if key.startswith(COUNTS) else "gauge"
    lines = [f"# HELP {name} {_unbroken(found[1] if found else OWN)}", f"# TYPE {name} {kind}"]
    return "".join(f"{line}\n" for line in [*lines, *(f"{k} {v}" for k, v in samples.items())])


def _escaped(text: str) -> str:
    return _unbroken(text).replace('"', '\\"')


def _unbroken(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
