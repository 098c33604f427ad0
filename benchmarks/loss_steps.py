"""Time of a training step with each part of a loss, against the same step with loss grpo.

`python -m benchmarks.loss_steps [--rows NAME ...] [--document FILE]`. All steps train the same
rollouts of the embedded model, with a learning rate that leaves the weights practically as they
are. A step with a part and one with grpo follow each other, so that changes of the machine's speed
affect both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import progress_of, seconds
from benchmarks.losses import SFT_FILE, Run, write_demonstrations
from benchmarks.pages import write_between
from benchmarks.report import when
from peralta_zmq import build, models
from peralta_zmq.config import load_config
from peralta_zmq.learning.learner import Learner
from peralta_zmq.rollout import RolloutGroup

WARM_UP, REPEATS = 2, 21  # steps
BEGIN, END = "<!-- table: make time-losses -->", "<!-- end of times -->"
GRPO = ["--loss.name=grpo"]
PARTS: dict[str, list[str]] = {
    "grpo": [],
    "importance_sampling_level sequence": ["--loss.importance-sampling-level=sequence"],
    "importance_sampling_level rollout": ["--loss.importance-sampling-level=rollout"],
    "aggregation token (dapo)": ["--loss.aggregation=token"],
    "aggregation sum": ["--loss.aggregation=sum"],
    "aggregation constant": ["--loss.aggregation=constant"],
    "epsilon_high 0.28": ["--loss.epsilon-high=0.28"],
    "c_clip 3": ["--loss.c-clip=3"],
    "delta 2": ["--loss.delta=2"],
    "objective reinforce": ["--loss.objective=reinforce"],
    "objective reinforce, epsilon_high 0.2": [
        "--loss.objective=reinforce",
        "--loss.epsilon-high=0.2",
    ],
    "objective importance": ["--loss.objective=importance"],
    "objective importance, sequence_clip_high 2": [
        "--loss.objective=importance",
        "--loss.importance-sampling-level=rollout",
        "--loss.sequence-clip-high=2",
    ],
    "objective on_policy": ["--loss.objective=on_policy"],
    "objective ratio": ["--loss.objective=ratio"],
    "objective cispo": ["--loss.objective=cispo", "--loss.epsilon-high=5"],
    "objective sapo": ["--loss.objective=sapo"],
    "objective vespo": ["--loss.objective=vespo"],
    **{
        f"importance_sampling_mode {mode}": [f"--loss.importance-sampling-mode={mode}"]
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "token_mask_high 8": ["--loss.token-mask-high=8"],
    "geo_mask_high 10": ["--loss.geo-mask-high=10"],
    "sequence_mask_high 100": ["--loss.sequence-mask-high=100"],
    "dppo_mask_low, dppo_mask_high 0.2": ["--loss.dppo-mask-low=0.2", "--loss.dppo-mask-high=0.2"],
    "one_sided_threshold 0.1": ["--loss.one-sided-threshold=0.1"],
    "ipo_threshold 0.1": ["--loss.ipo-threshold=0.1"],
    "off_policy_mask_threshold 0.5": ["--loss.off-policy-mask-threshold=0.5"],
    "kl_mask_high 0.01": ["--loss.kl-mask-high=0.01"],
    "top_entropy_quantile 0.2": ["--loss.top-entropy-quantile=0.2"],
    "m2_threshold 0.04": ["--loss.m2-threshold=0.04"],
    "adv_tau 0.5": ["--loss.adv-tau=0.5"],
    "kl_tau 0.001": ["--loss.kl-tau=0.001"],
    **{
        f"beta 0.001, kl_estimator {name}": ["--loss.beta=0.001", f"--loss.kl-estimator={name}"]
        for name in ("k1", "k2", "k3")
    },
    "beta 0.001, kl_clamp estimate": ["--loss.beta=0.001", "--loss.kl-clamp=estimate"],
    "beta 0.001, use_bias_correction_kl false": [
        "--loss.beta=0.001",
        "--loss.use-bias-correction-kl=false",
    ],
    "teacher_tau 1": ["--loss.teacher-tau=1"],
    "beta 1, kl_model teacher": ["--loss.beta=1", "--loss.kl-model=teacher"],
    "entropy_coef 0.01": ["--loss.entropy-coef=0.01"],
    "sft_file": [f"--loss.sft-file={SFT_FILE}"],
    "num_minibatches 4": ["--train.num-minibatches=4"],
    "num_iterations 2": ["--train.num-iterations=2"],
}


@dataclass(frozen=True, slots=True)
class Times:
    """One row of the table, in milliseconds."""

    name: str
    step: float  # median
    more: float  # median of the differences to the step with grpo before it


def main() -> None:
    """Measure every row and print the table; with --document, also write it into the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--document", type=Path, help="Markdown file with the begin and end markers of the table"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    models.use_threads()
    rows: list[Times] = []
    report = progress_of(len(arguments.rows))
    with tempfile.TemporaryDirectory() as folder:
        file = write_demonstrations(Path(folder))
        groups = Run(load_config("benchmarks.loss_steps", [])).sample()
        for name in arguments.rows:
            flags = [flag.replace(SFT_FILE, str(file)) for flag in PARTS[name]]
            rows.append(measure(name, flags, groups, repeats=arguments.repeats))
            report(_row_of(rows[-1]))
    text = table(rows, groups)
    sys.stdout.write(text)
    if arguments.document:
        write_between(arguments.document, BEGIN, END, text)


def measure(
    name: str, flags: Sequence[str], groups: Sequence[RolloutGroup], *, repeats: int
) -> Times:
    """Times of steps with loss grpo changed by `flags`, and of plain steps in between."""

    def step_of(learner: Learner) -> Callable[[], float]:
        return lambda: 1000 * seconds(lambda: learner.learn(groups))

    plain, changed = step_of(_learner_with(GRPO)), step_of(_learner_with([*GRPO, *flags]))
    pairs = [(plain(), changed()) for _ in range(WARM_UP + repeats)][WARM_UP:]
    differences = [after - before for before, after in pairs]
    return Times(name, median(after for _, after in pairs), median(differences))


def _learner_with(flags: Sequence[str]) -> Learner:
    config = load_config("benchmarks.loss_steps", ["--train.learning-rate=1e-12", *flags])
    model = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    return build.make_learner(config, model)


def table(rows: Sequence[Times], groups: Sequence[RolloutGroup]) -> str:
    """The rows as Markdown, with the size of the step, commit and date."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    head = "| part | step, ms | more than grpo, ms |\n|---|---|---|\n"
    size = f"{len(rollouts)} rollouts, {num_tokens:,} tokens."
    return head + "".join(f"{_row_of(row)}\n" for row in rows) + f"\n{size} {when()}\n"


def _row_of(row: Times) -> str:
    """One line of the table."""
    return f"| {row.name} | {row.step:.1f} | {row.more:+.1f} |"


if __name__ == "__main__":
    main()
