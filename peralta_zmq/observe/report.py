"""What a run has come to: summary.json, reward.png and the closing words.

Reads the files of a run folder and the two evaluations; knows nothing of how they were made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, cast

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, number, read_rows
from peralta_zmq.observe.verdict import Verdict
from peralta_zmq.rollout import Answer

SUMMARY, PLOT, PAGE = "summary.json", "reward.png", "report.html"
Summary: TypeAlias = dict[str, Any]
WIDTHS = (44, 26, 26)  # characters for problem, base answer, trained answer


def write_summary(
    folder: Path,
    *,
    eval_before: float | None,
    eval_after: float | None,
    accounting: Mapping[str, int],
    last_reports: Mapping[str, int],
    verdict: Verdict,
) -> Summary:
    """Write summary.json whole and return it; accuracies are shares between 0 and 1.

    `accounting` says what became of every group: `made` is the sum of what follows it, save
    `duplicates`, which came twice. `last_reports` are the groups made by each sender of which
    nothing can be missing from it.
    """
    rows, events = read_rows(folder / METRICS), read_rows(folder / EVENTS)
    rewards = [number(row, "reward") for row in rows]
    summary: Summary = {
        "reward_first": _known(rewards[:1]),
        "reward_last5": _known(rewards[-5:]),
        "eval_before": eval_before,
        "eval_after": eval_after,
        "seconds": round(_seconds(rows, events), 3),
        "steps": len({row.get("step") for row in rows}),
        "restarts": sum(row.get("event") == "resume" for row in events),
        "accounting": dict(accounting),
        "last_reports": dict(last_reports),
        "verdict": asdict(verdict),
    }
    replace_file(folder / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def _known(values: Sequence[float]) -> float | None:
    """Mean of the values that are numbers; None when there is none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _seconds(rows: Sequence[Row], events: Sequence[Row]) -> float:
    """Seconds at work: each session from its start to its last sign of life, pauses left out."""
    moments = [(number(row, "time"), row.get("event")) for row in [*rows, *events] if "time" in row]
    total, start, last = 0.0, math.nan, math.nan
    for moment, event in sorted(moments, key=lambda pair: pair[0]):
        if event in ("start", "resume") or math.isnan(start):
            total += 0.0 if math.isnan(start) else last - start
            start = moment
        last = moment
    return total + (0.0 if math.isnan(start) else last - start)


def write_reward_plot(folder: Path) -> Path | None:
    """Draw reward.png from the metrics, events and summary; None when matplotlib is missing."""
    try:
        from peralta_zmq.observe import plot
    except ModuleNotFoundError:
        return None
    rows = list({row.get("step"): row for row in read_rows(folder / METRICS)}.values())
    events, summary = read_rows(folder / EVENTS), _read_summary(folder / SUMMARY)
    resumes = [number(row, "step") for row in events if row.get("event") == "resume"]
    image = plot.reward_image(
        sorted(rows, key=lambda row: number(row, "step")),
        title=f"{folder.name}: reward of all sampled rollouts",
        eval_before=number(summary, "eval_before"),
        eval_after=number(summary, "eval_after"),
        resumes=[step for step in resumes if math.isfinite(step)],
    )
    replace_file(folder / PLOT, image)
    return folder / PLOT


def made_before(folder: Path) -> int:
    """Groups that the summary of an earlier end of this run knew of; 0 when there was none."""
    accounting = _read_summary(folder / SUMMARY).get("accounting")
    return int(cast("dict[str, int]", accounting)["made"]) if accounting else 0


def _read_summary(path: Path) -> Row:
    return json.loads(path.read_bytes()) if path.exists() else {}


def closing_text(
    folder: Path,
    summary: Summary,
    before: Sequence[Answer],
    after: Sequence[Answer],
    weights_folder: Path,
) -> str:
    """The last words of a run; of the answers, those to the same problems are shown."""
    named = [("plot", folder / PLOT), ("report", folder / PAGE), ("metrics", folder / METRICS)]
    return "\n".join(
        [
            *_sample_lines(before, after),
            "",
            f"held-out accuracy  {_change(summary, 'eval_before', 'eval_after')}",
            f"reward             {_change(summary, 'reward_first', 'reward_last5')}",
            f"steps              {summary['steps']} in {summary['seconds']:.0f} s, "
            f"restarts: {summary['restarts']}",
            f"groups             {_accounting_text(summary['accounting'])}",
            f"verdict            {summary['verdict']['sentence']}",
            *(f"{name:<19}{path}" for name, path in named if path.exists()),
            f"weights            {weights_folder}",
            "",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model = AutoModelForCausalLM.from_pretrained("{weights_folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{weights_folder}")',
        ]
    )


def _sample_lines(before: Sequence[Answer], after: Sequence[Answer]) -> list[str]:
    lines = [_columns("problem", "base answer", "trained answer", "reward")]
    said = {answer.problem: answer for answer in before}
    for trained in after:
        if (base := said.get(trained.problem)) is None:
            continue  # other examples were evaluated
        reward = f"{base.reward:g} -> {trained.reward:g}"
        lines.append(_columns(base.problem, base.answer, trained.answer, reward))
    return lines


def _columns(*texts: str) -> str:
    cells = [_fitted(text, width) for text, width in zip(texts, WIDTHS, strict=False)]
    return "  ".join([*cells, texts[-1]])


def _fitted(text: str, width: int) -> str:
    line = " ".join(text.split())
    return f"{line:<{width}}" if len(line) <= width else f"{line[: width - 3]}..."


def _accounting_text(accounting: Mapping[str, int]) -> str:
    made, *parts, duplicates = accounting.items()
    shown = [f"{count} {name.replace('_', ' ')}" for name, count in parts if count]
    twice = f"; {duplicates[1]} came twice and counted once" if duplicates[1] else ""
    return f"{made[1]} made = {' + '.join(shown)}{twice}"


def _change(summary: Summary, first: str, last: str) -> str:
    texts = ["-" if summary[key] is None else f"{summary[key]:.3f}" for key in (first, last)]
    return " -> ".join(texts)
