"""Results of a run: summary.json, reward.png and the closing report."""

# matplotlib annotates its parameters only in part
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, number, read_rows
from peralta_zmq.observe.verdict import Verdict
from peralta_zmq.rollout import Answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY, PLOT, REPORT = "summary.json", "reward.png", "report.html"
Summary: TypeAlias = dict[str, Any]
WIDTHS = (44, 26, 26)  # characters of problem, base answer, trained answer
LABEL_DISTANCE = 0.15  # in units of reward; labels closer than this would overlap in the plot
INK, BLUE, GREY, GREEN, RED = "#222222", "#1f5fa8", "#8a8a8a", "#2a7d3f", "#b5482f"


def write_summary(
    folder: Path,
    *,
    eval_before: float | None,
    eval_after: float | None,
    accounting: Mapping[str, int],
    last_reports: Mapping[str, int],
    verdict: Verdict,
) -> Summary:
    """Write summary.json atomically and return it; accuracies are between 0 and 1.

    `accounting` counts groups by outcome: `made` is the sum of the others except `duplicates`.
    `last_reports` maps each generator process that has ended to the number of groups it made.
    """
    rows, events = read_rows(folder / METRICS), read_rows(folder / EVENTS)
    rewards = [number(row, "reward") for row in rows]
    summary: Summary = {
        "reward_first": _mean(rewards[:1]),
        "reward_last5": _mean(rewards[-5:]),
        "eval_before": eval_before,
        "eval_after": eval_after,
        "seconds": round(_active_seconds(rows, events), 3),
        "steps": len({row.get("step") for row in rows}),
        "restarts": sum(row.get("event") == "resume" for row in events),
        "accounting": dict(accounting),
        "last_reports": dict(last_reports),
        "verdict": asdict(verdict),
    }
    replace_file(folder / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def made_before(folder: Path) -> int:
    """Number of groups made, from the summary of an earlier completion of this run; else 0."""
    accounting = _read_summary(folder).get("accounting")
    return int(cast("dict[str, int]", accounting)["made"]) if accounting else 0


def write_reward_plot(folder: Path) -> Path | None:
    """Write reward.png and return its path; returns None if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    rows = list({row.get("step"): row for row in read_rows(folder / METRICS)}.values())
    figure = Figure(figsize=(9.0, 4.8), dpi=150, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    axes.set_title(f"{folder.name}: reward of all sampled rollouts", loc="left", color=INK)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward; share of groups")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    _draw_rewards(axes, sorted(rows, key=lambda row: number(row, "step")))
    _draw_evaluations(axes, _read_summary(folder))
    resumes = [row for row in read_rows(folder / EVENTS) if row.get("event") == "resume"]
    if steps := [number(row, "step") for row in resumes if math.isfinite(number(row, "step"))]:
        edge = axes.get_xaxis_transform()  # x in steps, y in shares of the axes
        axes.vlines(steps, 0.0, 0.06, color=INK, linewidth=1.6, transform=edge, label="resume")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, reverse=True)
    image = io.BytesIO()
    canvas.print_png(image)
    replace_file(folder / PLOT, image.getvalue())
    return folder / PLOT


def closing_text(
    folder: Path,
    summary: Summary,
    before: Sequence[Answer],
    after: Sequence[Answer],
    weights_folder: Path,
) -> str:
    """Return the closing report of a run, with answers of the base and of the trained model."""
    files = [("plot", folder / PLOT), ("report", folder / REPORT), ("metrics", folder / METRICS)]
    return "\n".join(
        [
            *_answer_lines(before, after),
            "",
            f"held-out accuracy  {_change(summary, 'eval_before', 'eval_after')}",
            f"reward             {_change(summary, 'reward_first', 'reward_last5')}",
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


def _mean(values: Sequence[float]) -> float | None:
    """Mean of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _active_seconds(rows: Sequence[Row], events: Sequence[Row]) -> float:
    """Total duration of all sessions, each from its start to its last row or event, in seconds."""
    times = [(number(row, "time"), row.get("event")) for row in [*rows, *events] if "time" in row]
    total, previous = 0.0, math.nan
    for time, event in sorted(times, key=lambda pair: pair[0]):
        is_start = event in ("start", "resume") or math.isnan(previous)
        total += 0.0 if is_start else time - previous
        previous = time
    return total


def _read_summary(folder: Path) -> Row:
    path = folder / SUMMARY
    return json.loads(path.read_bytes()) if path.exists() else {}


def _draw_rewards(axes: Axes, rows: Sequence[Row]) -> None:
    steps, rewards, spreads, no_signal = (
        [number(row, key) for row in rows]
        for key in ("step", "reward", "reward_std", "frac_reward_zero_std")
    )
    low = [reward - spread for reward, spread in zip(rewards, spreads, strict=True)]
    high = [reward + spread for reward, spread in zip(rewards, spreads, strict=True)]
    if all(0.0 <= reward <= 1.0 for reward in rewards if math.isfinite(reward)):
        low, high = [max(0.0, value) for value in low], [min(1.0, value) for value in high]
        axes.set_ylim(0.0, 1.04)
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="reward ± std")
    label = "groups without signal"
    axes.plot(steps, no_signal, color=GREY, linewidth=1.0, linestyle="--", label=label)
    marker = "o" if len(rows) == 1 else ""
    axes.plot(steps, rewards, color=BLUE, linewidth=2.2, marker=marker, label="reward")


def _draw_evaluations(axes: Axes, summary: Row) -> None:
    """Draw a horizontal line for each held-out accuracy, labelled in the right margin."""
    before, after = number(summary, "eval_before"), number(summary, "eval_after")
    alignments = ("bottom", "top") if before > after else ("top", "bottom")
    if not abs(before - after) < LABEL_DISTANCE:
        alignments = ("center", "center")
    lines = ((before, "before", RED), (after, "after", GREEN))
    for (value, label, color), alignment in zip(lines, alignments, strict=True):
        if math.isfinite(value):
            axes.axhline(value, color=color, linewidth=1.2, linestyle=":")
            axes.annotate(
                f"held-out {label}\n{value:.3f}",
                (1.0, value),
                xycoords=axes.get_yaxis_transform(),  # x in shares of the axes, y in rewards
                xytext=(6, 0),
                textcoords="offset points",
                va=alignment,
                color=color,
                fontsize=9,
            )


def _answer_lines(before: Sequence[Answer], after: Sequence[Answer]) -> list[str]:
    lines = [_columns("problem", "base answer", "trained answer", "reward")]
    base_answers = {answer.problem: answer for answer in before}
    for trained in after:
        if base := base_answers.get(trained.problem):  # absent if other problems were evaluated
            reward = f"{base.reward:g} -> {trained.reward:g}"
            lines.append(_columns(base.problem, base.answer, trained.answer, reward))
    return lines


def _columns(*texts: str) -> str:
    cells = [_fit(text, width) for text, width in zip(texts, WIDTHS, strict=False)]
    return "  ".join([*cells, texts[-1]])


def _fit(text: str, width: int) -> str:
    line = " ".join(text.split())
    return f"{line:<{width}}" if len(line) <= width else f"{line[: width - 3]}..."


def _accounting_text(accounting: Mapping[str, int]) -> str:
    made, *outcomes, duplicates = accounting.items()
    names = {"no_signal": "without signal"}
    parts = [
        f"{count} {names.get(name, name.replace('_', ' '))}" for name, count in outcomes if count
    ]
    text = f"{made[1]} made = {' + '.join(parts)}"
    return f"{text}; {duplicates[1]} received twice and counted once" if duplicates[1] else text


def _change(summary: Summary, first: str, last: str) -> str:
    texts = ["-" if summary[key] is None else f"{summary[key]:.3f}" for key in (first, last)]
    return " -> ".join(texts)
