"""Reward of every loss and advantage after 40 steps of the embedded model.

`python -m benchmarks.losses [--rows NAME ...] [--keep FILE] [--document FILE]`. One process
alternates between sampling and training. The rollouts of a step are sampled from the weights before
the previous step, as with `train.max_async_level` 1. The table is deterministic on a machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import progress_of
from benchmarks.pages import write_between
from benchmarks.report import commit, when
from peralta_zmq import build, models
from peralta_zmq.config import Config, load_config
from peralta_zmq.engines import evaluate, generate_groups
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.environments import calculator
from peralta_zmq.learning.composition import PRESETS
from peralta_zmq.learning.losses import TokenLoss, Tokens
from peralta_zmq.learning.losses import evaluate as evaluate_loss
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Completion, Problem, RolloutGroup, rollout_of

NUM_STEPS, LAST = 40, 5
NUM_TOKENS, NUM_ROLLOUTS, REPEATS = 16_384, 128, 30
NUM_DEMONSTRATIONS = 64
SFT_FILE = "SFT_FILE"  # replaced by the path of the demonstrations
BEGIN, END = "<!-- table: make compare-losses -->", "<!-- end of table -->"
LOSSES: dict[str, list[str]] = {
    "reinforce": [],
    "reinforce, epsilon_high 0.02": ["--loss.epsilon-high=0.02"],
    **{
        name: [f"--loss.name={name}"]
        for name in PRESETS
        if name not in ("reinforce", "bnpo", "ref_kl")  # bnpo is dapo; ref_kl needs a teacher
    },
    "dapo, epsilon 0.05, c_clip 3": ["--loss.name=dapo", "--loss.epsilon=0.05", "--loss.c-clip=3"],
    **{
        f"dapo, {mode}": ["--loss.name=dapo", f"--loss.importance-sampling-mode={mode}"]
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "dapo, top_entropy_quantile 0.2": ["--loss.name=dapo", "--loss.top-entropy-quantile=0.2"],
    "dapo, kl_mask_high 0.01": ["--loss.name=dapo", "--loss.kl-mask-high=0.01"],
    "dapo, off_policy_mask_threshold 0.5": [
        "--loss.name=dapo",
        "--loss.off-policy-mask-threshold=0.5",
    ],
    **{
        f"dapo, beta 0.001, {name}": [
            "--loss.name=dapo",
            "--loss.beta=0.001",
            f"--loss.kl-estimator={name}",
        ]
        for name in ("k1", "k2", "k3")
    },
    "grpo_kl, kl_clamp estimate": ["--loss.name=grpo_kl", "--loss.kl-clamp=estimate"],
    "dapo, sft_file": ["--loss.name=dapo", f"--loss.sft-file={SFT_FILE}"],
    "dapo, num_iterations 2": ["--loss.name=dapo", "--train.num-iterations=2"],
    "decoupled_ppo, num_minibatches 4": ["--loss.name=decoupled_ppo", "--train.num-minibatches=4"],
    "reinforce, entropy_coef 0.01": ["--loss.entropy-coef=0.01"],
}
ADVANTAGES: dict[str, list[str]] = {
    "group_zscore": ["--advantage.name=group_zscore"],
    "group_zscore, scale_rewards batch": [
        "--advantage.name=group_zscore",
        "--advantage.scale-rewards=batch",
    ],
    "leave_one_out": ["--advantage.name=leave_one_out"],
    "leave_one_out, scale_rewards group": [
        "--advantage.name=leave_one_out",
        "--advantage.scale-rewards=group",
    ],
    "max_rl": ["--advantage.name=max_rl"],
    "length_weighted": ["--advantage.name=length_weighted"],
    "token_whitening": ["--advantage.name=token_whitening"],
    "token_whitening, group_adv_norm": [
        "--advantage.name=token_whitening",
        "--advantage.group-adv-norm",
    ],
}
ROWS = {f"loss {name}": flags for name, flags in LOSSES.items()} | {
    f"advantage {name}": flags for name, flags in ADVANTAGES.items()
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    name: str
    first: float  # mean reward of the first step
    last: float  # mean reward of the last five
    held_out: float  # greedy accuracy afterwards
    mismatch_kl: float  # mean over the steps
    loss_ms: float  # loss and gradient of NUM_TOKENS tokens, the fastest of REPEATS


def main() -> None:
    """Train every row and print the table; with --document, also write it into the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--document", type=Path, help="Markdown file with the begin and end markers of the table"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument(
        "--keep",
        type=Path,
        help="JSONL file of finished rows; the next start repeats only those of another commit, "
        "number of steps or flags",
    )
    arguments = parser.parse_args()
    models.use_threads()
    version = commit()
    finished = _read_outcomes(arguments.keep, _settings(version, arguments.steps))
    remaining = [name for name in arguments.rows if name not in finished]
    report = progress_of(len(remaining))
    with tempfile.TemporaryDirectory() as folder:
        file = write_demonstrations(Path(folder))
        for name in remaining:
            flags = [flag.replace(SFT_FILE, str(file)) for flag in ROWS[name]]
            finished[name] = outcome = train(name, flags, arguments.steps)
            if arguments.keep:
                with arguments.keep.open("a", encoding="utf-8") as kept:
                    settings = _settings(version, arguments.steps)[name]
                    kept.write(json.dumps([settings, asdict(outcome)]) + "\n")
            report(row_of(outcome))
    text = table([finished[name] for name in arguments.rows])
    sys.stdout.write(text)
    if arguments.document:
        write_between(arguments.document, BEGIN, END, text)


def _settings(version: str, num_steps: int) -> dict[str, list[Any]]:
    """Commit, steps and flags of each row, by its name."""
    return {name: [version, num_steps, flags] for name, flags in ROWS.items()}


def _read_outcomes(file: Path | None, settings: Mapping[str, list[Any]]) -> dict[str, Outcome]:
    """The rows in a file that an earlier start wrote with these settings, by name."""
    lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
    rows = [(kept, Outcome(**row)) for kept, row in map(json.loads, lines)]
    return {row.name: row for kept, row in rows if kept == settings.get(row.name)}


def write_demonstrations(folder: Path) -> Path:
    """Write some training problems of the calculator with their answers for loss.sft_file."""
    rows = islice(calculator.problems("train", 0), NUM_DEMONSTRATIONS)
    texts = [{"prompt": row.question, "completion": row.answer} for row in rows]
    file = folder / "demonstrations.jsonl"
    file.write_text("".join(f"{json.dumps(text)}\n" for text in texts), "utf-8")
    return file


def train(name: str, flags: Sequence[str], num_steps: int) -> Outcome:
    """Train with the default settings, changed by `flags`."""
    config = load_config("benchmarks.losses", [f"--train.max-steps={num_steps}", *flags])
    torch.manual_seed(config.run.seed)
    run = Run(config)
    rows: list[dict[str, float]] = []
    groups = run.sample()
    for _ in range(num_steps):
        next_groups = run.sample()
        rows.append(run.learn(groups))
        groups = next_groups
    return Outcome(
        name,
        first=rows[0]["reward"],
        last=fmean(row["reward"] for row in rows[-LAST:]),
        held_out=run.accuracy(),
        mismatch_kl=fmean(row["mismatch_kl"] for row in rows),
        loss_ms=loss_milliseconds(build.make_loss(config)),
    )


def loss_milliseconds(loss: TokenLoss) -> float:
    """Time of the loss and its gradient with respect to the logprobs and the entropy.

    One thread, because several wait for each other on a busy machine.
    """
    random = torch.Generator().manual_seed(0)
    policy, *others = (-2 * torch.rand(5, NUM_TOKENS, generator=random)).unbind()
    rollouts = torch.arange(NUM_ROLLOUTS).repeat_interleave(NUM_TOKENS // NUM_ROLLOUTS)
    tokens = Tokens(
        logprobs=policy.requires_grad_(), old_logprobs=others[0], prox_logprobs=others[1],
        ref_logprobs=others[2], teacher_logprobs=others[3],
        advantages=torch.randn(NUM_ROLLOUTS, generator=random)[rollouts],
        mask=torch.ones(NUM_TOKENS), sequence=rollouts, num_sequences=NUM_ROLLOUTS,
        step_tokens=NUM_TOKENS, step_sequences=NUM_ROLLOUTS,
        entropy=torch.rand(NUM_TOKENS, generator=random).requires_grad_(),
    )  # fmt: skip
    seconds, num_threads = list[float](), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(REPEATS):
        started = time.perf_counter()
        evaluate_loss(loss, tokens)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(num_threads)
    return 1000 * min(seconds)


class Run:
    """A learner, and an engine with a separate copy of its weights."""

    def __init__(self, config: Config) -> None:
        device, self._config = torch.device("cpu"), config
        self._tokenizer = models.load_tokenizer(models.EMBEDDED)
        self._model = models.load_model(models.EMBEDDED, device=device, dtype=torch.float32)
        self._learner = build.make_learner(config, self._model)
        serving = models.load_model(
            models.EMBEDDED, device=device, dtype=models.choose_dtype(device)[0]
        )
        self._engine = NativeEngine.open_live(
            serving, self._tokenizer, EngineSettings(slots=64, max_model_len=256)
        )
        problems = list(calculator.problems("train", config.run.seed))
        random.Random(config.run.seed).shuffle(problems)
        self._problems: Iterator[Problem] = cycle(problems)

    def sample(self) -> list[RolloutGroup]:
        """Sample the groups of one step from the engine's weights."""
        config, step = self._config, self._engine.step
        sampling = build.make_sampling(config, seed=1000 * config.run.seed + step)
        answers: list[tuple[Problem, list[Completion]]] = []
        generate_groups(
            self._engine, self._tokenizer, islice(self._problems, config.groups_per_step),
            lambda problem, completions: answers.append((problem, completions)),
            num_generations=config.sampling.num_generations, sampling=sampling,
        )  # fmt: skip
        return [
            RolloutGroup(
                run_id="losses", generator_id="local", incarnation=b"00000000", sequence=number,
                problem_id=problem.id, task=problem.task, policy_step=step, weights_id="",
                rollouts=tuple(
                    rollout_of(each, calculator.reward(problem, each.text)) for each in completions
                ),
            )
            for number, (problem, completions) in enumerate(answers)
        ]  # fmt: skip

    def learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take one training step, and give the engine its weights."""
        row = self._learner.learn(groups).metrics
        self._serve()
        return row

    def accuracy(self) -> float:
        """Greedy accuracy on the held-out problems."""
        with closing(build.open_environments(self._config, "eval")) as held_out:
            answers = evaluate(
                self._engine, self._tokenizer, held_out.problems, held_out.score,
                sampling=build.make_eval_sampling(self._config, seed=self._config.run.seed),
            )  # fmt: skip
        return fmean(rollout.reward for _, rollouts in answers for rollout in rollouts)

    def _serve(self) -> None:
        """Apply the policy's weights to the engine, in the engine's dtype."""
        weights = models.weights_of(self._model)
        dtype = models.choose_dtype(torch.device("cpu"))[0]
        weights = {name: each.to(dtype) for name, each in weights.items()}
        self._engine.apply(WeightUpdate(self._learner.step, weights))


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown, with commit and date."""
    head = (
        "| | reward, step 1 | reward, last 5 steps | held-out after | mismatch_kl | loss, ms |\n"
        "|---|---|---|---|---|---|\n"
    )
    return head + "".join(f"{row_of(each)}\n" for each in outcomes) + f"\n{when()}\n"


def row_of(outcome: Outcome) -> str:
    """One line of the table."""
    return (
        f"| {outcome.name} | {outcome.first:.3f} | {outcome.last:.3f} | {outcome.held_out:.3f} "
        f"| {outcome.mismatch_kl:.5f} | {outcome.loss_ms:.1f} |"
    )


if __name__ == "__main__":
    main()
