"""Results of a run: summary.json and the results printed at the end."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.observe.metrics import (
    EVALUATIONS,
    EVENTS,
    METRICS,
    Row,
    finite_mean,
    format_number,
    nan_to_null,
    number,
    read_rows,
)
from peralta_zmq.observe.run_state import SESSION_STARTS
from peralta_zmq.observe.verdict import Verdict
from peralta_zmq.rollout import CUT_OFF

SUMMARY = "summary.json"
REPORT = "report.html"
Summary: TypeAlias = dict[str, Any]
Evaluation: TypeAlias = dict[str, Any]  # row of eval.jsonl; `answers` has the fields of Answer
WIDTHS = (44, 26, 26)  # characters of problem, base answer, trained answer


def write_summary(
    folder: Path,
    *,
    accounting: Mapping[str, int],
    final_statuses: Mapping[str, int],
    verdict: Verdict,
) -> Summary:
    """Write summary.json atomically and return it.

    `accounting` counts groups by outcome: `made` is the sum of the others except `duplicates`.
    `final_statuses` has the number of groups that each ended generator process made.
    """
    rows = read_rows(folder / METRICS)
    events = read_rows(folder / EVENTS)
    rewards = [number(row, "reward") for row in rows]
    base, trained = _base_and_trained_evaluation(folder)
    content = {
        "reward_first": finite_mean(rewards[:1]),
        "reward_last5": finite_mean(rewards[-5:]),
        "eval_before": number(base, "accuracy"),
        "eval_after": number(trained, "accuracy"),
        "seconds": round(_active_seconds(rows, events), 3),
        "steps": len({row.get("step") for row in rows}),
        "restarts": sum(row.get("event") == "resume" for row in events),
        "accounting": dict(accounting),
        "final_statuses": dict(final_statuses),
        "verdict": asdict(verdict),
    }
    summary: Summary = nan_to_null(content)
    replace_file(folder / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def made_before(folder: Path) -> int:
    """The number of groups made, from summary.json; 0 before it is written."""
    path = folder / SUMMARY
    summary: Summary = json.loads(path.read_bytes()) if path.exists() else {}
    return summary.get("accounting", {}).get("made", 0)


def closing_text(folder: Path, summary: Summary, weights_folder: Path) -> str:
    """The text printed at the end, with answers before and after training."""
    base, trained = _base_and_trained_evaluation(folder)
    files = [("report", folder / REPORT), ("metrics", folder / METRICS)]
    return "\n".join(
        [
            *(_answer_lines(base, trained) if base else []),
            f"held-out accuracy  {change_text(summary, 'eval_before', 'eval_after')}",
            f"reward             {change_text(summary, 'reward_first', 'reward_last5')}",
            f"steps              {summary['steps']} in {summary['seconds']:.0f} s, "
            f"restarts: {summary['restarts']}",
            f"groups             {_accounting_text(summary['accounting'])}",
            f"verdict            {summary['verdict']['sentence']}",
            *(f"{name:<19}{path}" for name, path in files if path.exists()),
            f"weights            {weights_folder}",
            "",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model = AutoModelForCausalLM.from_pretrained("{weights_folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{weights_folder}")',
        ]
    )


def change_text(summary: Mapping[str, object], first: str, last: str) -> str:
    """Format two fields of a summary as '0.424 -> 1.000'; a missing number is a dash."""
    return " -> ".join(format_number(number(summary, key), ".3f") for key in (first, last))


def _base_and_trained_evaluation(folder: Path) -> tuple[Evaluation, Evaluation]:
    """The evaluation of step 0, which is of the base model, and the newest one; {} if missing."""
    rows: Sequence[Evaluation] = read_rows(folder / EVALUATIONS)
    return next((row for row in rows if row["step"] == 0), {}), rows[-1] if rows else {}


def _active_seconds(rows: Sequence[Row], events: Sequence[Row]) -> float:
    """Sum of the seconds of each session, from its start to its last row or event."""
    times = [(number(row, "time"), row.get("event")) for row in [*rows, *events] if "time" in row]
    total = 0.0
    previous = math.nan
    for time, event in sorted(times, key=lambda pair: pair[0]):
        is_start = event in SESSION_STARTS or math.isnan(previous)
        total += 0.0 if is_start else time - previous
        previous = time
    return total


def _answer_lines(base: Evaluation, trained: Evaluation) -> list[str]:
    """Lines that compare the answers to the problems in both evaluations, at full length.

    They are a table, in which long problems are wrapped, if all answers fit into its columns.
    """
    base_answers = {answer["problem"]: answer for answer in base.get("answers", [])}
    titles = ("problem", "base answer", "trained answer", "reward")
    rows: list[list[str]] = []
    for after in trained.get("answers", []):
        if before := base_answers.get(after["problem"]):
            reward = f"{before['reward']:g} -> {after['reward']:g}"
            marked = (
                each["answer"] + CUT_OFF * bool(each.get("cut_off")) for each in (before, after)
            )
            texts = (after["problem"], *marked, reward)
            rows.append([" ".join(text.split()) for text in texts])
    if all(len(answer) <= WIDTHS[1] for row in rows for answer in row[1:3]):
        return [*_columns(*titles), *(line for row in rows for line in _columns(*row)), ""]
    lines: list[str] = []
    for row in rows:
        lines += [f"{title:<19}{text}" for title, text in zip(titles, row, strict=True)]
        lines.append("")
    return lines


def _columns(problem: str, base: str, trained: str, reward: str) -> list[str]:
    first, *others = textwrap.wrap(problem, WIDTHS[0]) or [""]
    cells = zip((first, base, trained), WIDTHS, strict=True)
    padded = [f"{text:<{width}}" for text, width in cells]
    return ["  ".join([*padded, reward]), *others]


def _accounting_text(accounting: Mapping[str, int]) -> str:
    """Format for example as '96 made = 90 trained + 6 stale'."""
    counts = [
        f"{count} {name.replace('no_', 'without ').replace('_', ' ')}"
        for name, count in accounting.items()
        if count and name not in ("made", "duplicates")
    ]
    text = f"{accounting['made']} made = {' + '.join(counts)}"
    duplicates = accounting["duplicates"]
    return f"{text}; {duplicates} received twice and counted once" if duplicates else text
