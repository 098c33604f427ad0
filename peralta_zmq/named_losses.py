"""The named losses: the objective of each and its settings in [loss]; `--help loss`.

`learning/losses.py` computes them. To add one, add it to LOSSES.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Objective -> its loss per token and its options in [loss].
OBJECTIVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "reinforce": ("-A pi; with epsilon_high times sg[min(r, 1 + epsilon_high)]", ("epsilon_high",)),
    "importance": (
        "-sg[r (A - kl_tau lr)] pi; tokens are masked as with token_mask, and rollouts whose "
        "geometric mean of e^lr is outside 0.1 to 10, or that have a token with e^lr above 100; r "
        "of a whole rollout (sequence_product) is at most 10",
        (),
    ),
    "on_policy": ("-A exp(pi - sg[pi])", ()),
    "ratio": ("-A r", ()),
    "ppo": (
        "-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A); epsilon_high is epsilon "
        "if not set",
        ("epsilon", "epsilon_high", "delta"),
    ),
    "cispo": ("-sg[min(r, epsilon_high)] A pi", ("epsilon_high",)),
    "sapo": ("-A sigmoid(t (r - 1)) 4 / t, t = 1 for A > 0, else 1.05", ()),
    "vespo": (
        "-sg[W^k exp(l (1 - W))] A pi, W = product of r w over the rollout; k = 2 and l = 3 for "
        "A >= 0, else k = 3 and l = 2",
        (),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """An objective with settings of [loss]."""

    objective: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mask: tuple[Literal["dppo", "ipo", "fall"], float] | None = None
    """Tokens whose probability changed by more than this are left out: those that rose with A > 0
    or fell with A <= 0 (dppo), all of them (ipo), or those that fell."""
    m2_threshold: float | None = None
    """Of a step, leave out the tokens with the largest (prox - mu)^2, as few as bring the mean of
    the others below this."""
    uses_rewards: bool = True  # False: the advantage is 0, apart from the teacher's term
    corrects_kl: bool = True  # False: the KL term of beta is not multiplied by the ratio

    @property
    def options(self) -> tuple[str, ...]:
        """Settings of [loss] that not every loss has."""
        return OBJECTIVES[self.objective][1]


TOKEN_MASK = (0.125, 8.0)
LOSSES: dict[str, NamedLoss] = {
    "reinforce": NamedLoss(
        objective="reinforce", source="PipelineRL, which sets epsilon_high 0.02"
    ),
    "grpo": NamedLoss(
        objective="ppo", settings={"aggregation": "rollout"},
        source="TRL, arXiv 2402.03300: mean over each rollout, then over rollouts",
    ),
    "dapo": NamedLoss(
        objective="ppo",
        source="TRL's default, arXiv 2503.14476: mean over all tokens of the update",
    ),
    "bnpo": NamedLoss(
        objective="ppo",
        source="TRL: as dapo, but TRL's mean is over a micro-batch, this one over the update",
    ),
    "dr_grpo": NamedLoss(
        objective="ppo", settings={"aggregation": "constant"}, source="TRL, arXiv 2503.20783"
    ),
    "cispo": NamedLoss(
        objective="cispo", settings={"epsilon_high": 5.0}, source="TRL, arXiv 2506.13585"
    ),
    "sapo": NamedLoss(
        objective="sapo", settings={"aggregation": "rollout"}, source="TRL, arXiv 2511.20347"
    ),
    "luspo": NamedLoss(
        objective="ppo", source="TRL, arXiv 2602.05261",
        settings={"importance_sampling_level": "sequence_mean", "aggregation": "sum"},
    ),
    "vespo": NamedLoss(objective="vespo", source="TRL, arXiv 2602.10693"),
    "gspo": NamedLoss(
        objective="ppo",
        settings={"importance_sampling_level": "sequence_mean", "aggregation": "rollout",
                  "epsilon": 3e-4, "epsilon_high": 4e-4},
        source="arXiv 2507.18071; AReaL weights rollouts by length: aggregation token",
    ),
    "importance": NamedLoss(
        objective="importance", settings={"token_mask": TOKEN_MASK}, source="Surogate, prime-rl"
    ),
    "importance_sequence": NamedLoss(
        objective="importance",
        settings={"importance_sampling_level": "sequence_product", "aggregation": "rollout",
                  "token_mask": TOKEN_MASK},
        source="Surogate, prime-rl with ratio_type sequence",
    ),
    "dppo": NamedLoss(
        objective="ratio", mask=("dppo", 0.2), settings={"kl_tau": 1e-3}, source="prime-rl"
    ),
    "ipo": NamedLoss(
        objective="ratio", mask=("ipo", 0.1), settings={"kl_tau": 1e-3}, source="prime-rl"
    ),
    "ref_kl": NamedLoss(
        objective="ratio", mask=("fall", 0.2), settings={"teacher_tau": 1.0, "kl_tau": 1e-3},
        uses_rewards=False, source="prime-rl: on-policy distillation, without rewards",
    ),
    "decoupled_ppo": NamedLoss(
        objective="ppo", source="AReaL",
        settings={"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": None},
    ),
    "m2po": NamedLoss(objective="ratio", m2_threshold=0.04, source="arXiv 2510.01161"),
    "grpo_kl": NamedLoss(
        objective="on_policy", settings={"aggregation": "rollout", "beta": 0.001},
        corrects_kl=False, source="async-grpo, without the ratio in kl",
    ),
}  # fmt: skip
HELP = """\
[loss] A named loss is an objective with settings, each of which can be changed. --help describes
the settings, docs/losses.md has the formulas in full.

pi, mu, prox = logprobs of a token under the policy, the weights that sampled it, and the policy
before the step; lr = pi - mu; r = exp(lr), w = 1, or with importance_sampling_mode
r = exp(pi - prox), w = exp(prox - mu); A = advantage + teacher_tau (teacher - pi);
sg[x] is x without gradient. A loss is the aggregate over tokens of
    keep w objective + kl_tau lr^2 + beta kl - entropy_coef entropy
where keep is 0 for a masked token, else 1.
"""


def help_text() -> str:
    """The objectives and the named losses, for `bin/trainer --help loss`."""
    lines = [HELP, "objectives, per token:"]
    lines += [_row(name, formula) for name, (formula, _) in OBJECTIVES.items()]
    lines += ["", "loss.name:"]
    for name, loss in LOSSES.items():
        settings = (f"{option} {value}" for option, value in loss.settings.items())
        lines.append(_row(name, f"{', '.join([loss.objective, *settings])} ({loss.source})"))
    return "\n".join(lines) + "\n"


def _row(name: str, text: str) -> str:
    """Two columns, at most 100 characters wide."""
    indent = " " * 23
    first = f"  {name:<20} "
    return textwrap.fill(
        text, 100, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    )
