"""The reward curve of a run as a PNG. The one door to matplotlib, so imported only when drawing.

Knows rows and pixels; knows nothing of files.
"""

# matplotlib annotates its parameters only in part
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from peralta_zmq.observe.metrics import Row, number

CLOSE = 0.15  # rewards; two names would touch
INK, BLUE, GREY, GREEN, RED = "#222222", "#1f5fa8", "#8a8a8a", "#2a7d3f", "#b5482f"


def reward_image(
    rows: Sequence[Row],
    *,
    title: str,
    eval_before: float,
    eval_after: float,
    resumes: Sequence[float],
) -> bytes:
    """PNG of reward by step; `rows` ascend by step, an evaluation of NaN is left out."""
    figure = Figure(figsize=(9.0, 4.8), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_frame(axes, title)
    _draw_rewards(axes, rows)
    sides = _sides(eval_before, eval_after)
    _draw_evaluation(axes, eval_before, color=RED, word="before", side=sides[0])
    _draw_evaluation(axes, eval_after, color=GREEN, word="after", side=sides[1])
    if resumes:
        edge = axes.get_xaxis_transform()  # x in steps, y in shares of the axes
        axes.vlines(resumes, 0.0, 0.06, color=INK, linewidth=1.6, transform=edge, label="resume")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, reverse=True)
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()


def _sides(before: float, after: float) -> tuple[str, str]:
    """Where the names of the two evaluations stand at their lines, out of each other's way."""
    if not abs(before - after) < CLOSE:
        return "center", "center"
    return ("bottom", "top") if before > after else ("top", "bottom")


def _draw_frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward; share of groups")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_rewards(axes: Axes, rows: Sequence[Row]) -> None:
    steps = [number(row, "step") for row in rows]
    rewards = [number(row, "reward") for row in rows]
    spreads = [number(row, "reward_std") for row in rows]
    silent = [number(row, "frac_reward_zero_std") for row in rows]
    low = [reward - spread for reward, spread in zip(rewards, spreads, strict=True)]
    high = [reward + spread for reward, spread in zip(rewards, spreads, strict=True)]
    if all(0.0 <= reward <= 1.0 for reward in rewards if math.isfinite(reward)):
        low, high = [max(0.0, value) for value in low], [min(1.0, value) for value in high]
        axes.set_ylim(0.0, 1.04)
    axes.fill_between(
        steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="reward \u00b1 std"
    )
    axes.plot(
        steps, silent, color=GREY, linewidth=1.0, linestyle="--", label="groups without signal"
    )
    single = "o" if len(rows) == 1 else ""
    axes.plot(steps, rewards, color=BLUE, linewidth=2.2, marker=single, label="reward")


def _draw_evaluation(axes: Axes, value: float, *, color: str, word: str, side: str) -> None:
    """A thin line across, named in the right margin where no curve passes."""
    if not math.isfinite(value):
        return
    axes.axhline(value, color=color, linewidth=1.2, linestyle=":")
    axes.annotate(
        f"held-out {word}\n{value:.3f}",
        (1.0, value),
        xycoords=axes.get_yaxis_transform(),  # x in shares of the axes, y in rewards
        xytext=(6, 0),
        textcoords="offset points",
        va=side,
        color=color,
        fontsize=9,
    )
