"""The parts of a loss and their options; each named loss is a table of them.

`losses.policy_loss` computes the loss. This module imports no torch, so that `bin/trainer --help
loss` prints its tables at once. To add a named loss, add it to PRESETS and to the table in
`registry.py`; to add an option, a field to `Composition` and to `LossSection`
(config/objective_sections.py).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peralta_zmq.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The parts of a loss and their options, named as in [loss]; None = off."""

    objective: str
    importance_sampling_level: str = "token"
    aggregation: str = "token"
    max_completion_length: int = 1  # sampling.max_completion_length, for aggregation constant
    # The advantage
    adv_tau: float = 1.0
    teacher_tau: float = 0.0
    # Options of the objectives, see OBJECTIVES
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    c_clip: float | None = None
    sequence_clip_high: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    # Off-policy correction
    importance_sampling_mode: str | None = None
    importance_sampling_clip_min: float | None = None
    importance_sampling_clip_max: float | None = 3.0
    # Masks
    token_mask_low: float | None = None
    token_mask_high: float | None = None
    geo_mask_low: float | None = None
    geo_mask_high: float | None = None
    sequence_mask_low: float | None = None
    sequence_mask_high: float | None = None
    dppo_mask_low: float | None = None
    dppo_mask_high: float | None = None
    one_sided_threshold: float | None = None
    ipo_threshold: float | None = None
    off_policy_mask_threshold: float | None = None
    kl_mask_high: float | None = None
    # Masks by a threshold that depends on all tokens of the step (selection.py)
    top_entropy_quantile: float = 1.0  # 1 = off
    m2_threshold: float | None = None
    # KL terms
    kl_tau: float = 0.0
    beta: float = 0.0
    kl_model: str = "reference"
    kl_estimator: str = "k3"
    kl_clamp: str = "log_ratio"
    use_bias_correction_kl: bool = True

    @property
    def has_masks(self) -> bool:
        """True if an option leaves out tokens or rollouts."""
        return any(getattr(self, option) is not None for option in MASK_OPTIONS)

    @property
    def reference_models(self) -> set[str]:
        """The models other than the policy whose logprobs the loss needs."""
        teacher = {"teacher"} if self.teacher_tau else set[str]()
        return teacher | ({self.kl_model} if self.beta else set())


MASK_OPTIONS = (
    *("token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high"),
    *("sequence_mask_low", "sequence_mask_high", "dppo_mask_low", "dppo_mask_high"),
    *("one_sided_threshold", "ipo_threshold", "off_policy_mask_threshold", "kl_mask_high"),
)
# Objective -> its loss per token and its options.
OBJECTIVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "reinforce": ("-A pi; with epsilon_high times sg[min(r, 1 + epsilon_high)]", ("epsilon_high",)),
    "importance": (
        "-sg[r (A - kl_tau lr)] pi; with sequence_clip_high, r is at most that",
        ("sequence_clip_high",),
    ),
    "on_policy": ("-A exp(pi - sg[pi])", ()),
    "ratio": ("-A r", ()),
    "ppo": (
        "-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A); at most c_clip |A| "
        "for A < 0; epsilon_high is epsilon if not set",
        ("epsilon", "epsilon_high", "delta", "c_clip"),
    ),
    "cispo": ("-sg[min(r, epsilon_high)] A pi", ("epsilon_high",)),
    "sapo": (
        "-A sigmoid(t (r - 1)) 4 / t, t = sapo_temperature_pos for A > 0, else _neg",
        ("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "vespo": (
        "-sg[W^k exp(l (1 - W))] A pi, W = product of r w over the rollout; k = vespo_k_pos and "
        "l = vespo_lambda_pos for A >= 0, else _neg",
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
}
# Option -> the option without which it has no effect.
NEEDED_OPTIONS = {
    **dict.fromkeys(("kl_model", "kl_estimator", "kl_clamp", "use_bias_correction_kl"), "beta"),
    "importance_sampling_clip_min": "importance_sampling_mode",
    "importance_sampling_clip_max": "importance_sampling_mode",
}
BOUNDS = (
    ("token_mask_low", "token_mask_high"),
    ("geo_mask_low", "geo_mask_high"),
    ("sequence_mask_low", "sequence_mask_high"),
    ("importance_sampling_clip_min", "importance_sampling_clip_max"),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named loss."""

    source: str
    settings: Mapping[str, Any]  # of [loss], by name


MASKS = {
    "token_mask_low": 0.125, "token_mask_high": 8.0, "geo_mask_low": 0.1, "geo_mask_high": 10.0,
    "sequence_mask_low": 0.0, "sequence_mask_high": 100.0,
}  # fmt: skip
PRESETS: dict[str, Preset] = {
    "reinforce": Preset("PipelineRL, which sets epsilon_high 0.02", {"objective": "reinforce"}),
    "grpo": Preset(
        "TRL, arXiv 2402.03300: mean over each rollout, then over rollouts",
        {"objective": "ppo", "aggregation": "rollout"},
    ),
    "dapo": Preset(
        "TRL's default, arXiv 2503.14476: mean over all tokens of the update", {"objective": "ppo"}
    ),
    "bnpo": Preset(
        "TRL: as dapo, but TRL's mean is over a micro-batch, this one over the update",
        {"objective": "ppo"},
    ),
    "dr_grpo": Preset(
        "TRL, arXiv 2503.20783", {"objective": "ppo", "aggregation": "constant"}
    ),
    "cispo": Preset("TRL, arXiv 2506.13585", {"objective": "cispo", "epsilon_high": 5.0}),
    "sapo": Preset("TRL, arXiv 2511.20347", {"objective": "sapo", "aggregation": "rollout"}),
    "luspo": Preset(
        "TRL, arXiv 2602.05261",
        {"objective": "ppo", "importance_sampling_level": "sequence", "aggregation": "sum"},
    ),
    "vespo": Preset("TRL, arXiv 2602.10693", {"objective": "vespo"}),
    "gspo": Preset(
        "arXiv 2507.18071; AReaL weights rollouts by length: aggregation token",
        {"objective": "ppo", "importance_sampling_level": "sequence", "aggregation": "rollout",
         "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "importance": Preset("Surogate, prime-rl", {"objective": "importance", **MASKS}),
    "importance_sequence": Preset(
        "Surogate, prime-rl with ratio_type sequence",
        {"objective": "importance", "importance_sampling_level": "rollout",
         "aggregation": "rollout", "sequence_clip_high": 10.0, **MASKS},
    ),
    "dppo": Preset(
        "prime-rl",
        {"objective": "ratio", "dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "kl_tau": 1e-3},
    ),
    "ipo": Preset("prime-rl", {"objective": "ratio", "ipo_threshold": 0.1, "kl_tau": 1e-3}),
    "ref_kl": Preset(
        "prime-rl: on-policy distillation",
        {"objective": "ratio", "adv_tau": 0.0, "teacher_tau": 1.0, "one_sided_threshold": 0.2,
         "kl_tau": 1e-3},
    ),
    "decoupled_ppo": Preset(
        "AReaL",
        {"objective": "ppo", "importance_sampling_mode": "token_mask",
         "importance_sampling_clip_max": None},
    ),
    "m2po": Preset(
        "arXiv 2510.01161", {"objective": "ratio", "m2_threshold": 0.04}
    ),
    "grpo_kl": Preset(
        "async-grpo, with kl_clamp estimate",
        {"objective": "on_policy", "aggregation": "rollout", "beta": 0.001,
         "use_bias_correction_kl": False},
    ),
}  # fmt: skip


def compose(
    name: str,
    options: Mapping[str, Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    entropy_coef: float = 0.0,
) -> Composition:
    """The named loss with some options changed.

    Raises ConfigError for an option without effect, for `kwargs`, for bounds in the wrong order,
    and if the gradient would be 0; an entropy bonus, which `losses` adds to any loss, prevents the
    latter.
    """
    if kwargs:
        raise ConfigError(
            f"loss.kwargs is only for a loss of your own; set the options of '{name}' in [loss]"
        )
    parts = Composition(**{**_settings_of(name, options.get("objective")), **options})
    own_options = OBJECTIVES[parts.objective][1]
    for option in options:
        presets = [other for other, preset in PRESETS.items() if option in _own_options(preset)]
        if presets and option not in own_options:
            raise ConfigError(
                f"loss.{option} is not an option of loss '{name}'; remove it or set loss.name to "
                f"{' or '.join(presets)}"
            )
        if (needed := NEEDED_OPTIONS.get(option)) and not getattr(parts, needed):
            raise ConfigError(
                f"loss.{option} has no effect without loss.{needed}; set it or remove loss.{option}"
            )
    for low, high in BOUNDS:
        lower = getattr(parts, low)
        upper = getattr(parts, high)
        if lower is not None and upper is not None and not lower < upper:
            raise ConfigError(
                f"loss.{low} {lower} is not below loss.{high} {upper}; "
                f"no token would remain; lower loss.{low}"
            )
    if "sequence_clip_high" in options and parts.importance_sampling_level == "token":
        raise ConfigError(
            "loss.sequence_clip_high limits the ratio of a whole rollout; set loss.name "
            "importance_sequence or remove loss.sequence_clip_high"
        )
    _check_objective(parts)
    if not any((parts.adv_tau, parts.teacher_tau, parts.kl_tau, parts.beta, entropy_coef)):
        raise ConfigError(
            "loss.adv_tau, loss.teacher_tau, loss.kl_tau, loss.beta and loss.entropy_coef are all "
            "0, so the gradient would be 0; set one of them"
        )
    return parts


def _check_objective(parts: Composition) -> None:
    """Raise ConfigError for parts that do not fit the objective."""
    if parts.objective == "cispo" and parts.epsilon_high is None:
        raise ConfigError("loss.objective cispo needs loss.epsilon_high, for example 5")
    is_by_rollout = parts.importance_sampling_level != "token" or (
        parts.importance_sampling_mode or ""
    ).startswith("sequence")
    if parts.objective == "vespo" and is_by_rollout:
        raise ConfigError(
            "loss vespo computes the ratio of a whole rollout itself; set "
            "loss.importance_sampling_level token, and loss.importance_sampling_mode "
            "token_truncate or token_mask or none"
        )


def _settings_of(name: str, objective: str | None) -> dict[str, Any]:
    """The settings of a preset, without the options of its objective if it gets another one."""
    settings = PRESETS[name].settings
    own_options = OBJECTIVES[settings["objective"]][1]
    if objective in (None, settings["objective"]):
        own_options = ()
    return {option: value for option, value in settings.items() if option not in own_options}


def _own_options(preset: Preset) -> tuple[str, ...]:
    """Options of the preset's objective."""
    return OBJECTIVES[preset.settings["objective"]][1]


HELP = """\
[loss] A loss is a composition of parts; loss.name is a preset of their settings, each of which can
be changed. --help describes the settings, docs/losses.md has the formulas in full.

pi, mu, prox = logprobs of a token under the policy, the weights that sampled it, and the policy
before the step; lr = pi - mu; r = exp(lr), w = 1, or with importance_sampling_mode
r = exp(pi - prox), w = exp(prox - mu); A = adv_tau * advantage + teacher_tau (teacher - pi);
sg[x] is x without gradient. A loss is the aggregate over tokens of
    keep w objective + kl_tau lr^2 + beta kl - entropy_coef entropy
where keep is 0 for a masked token, else 1.
"""


def help_text() -> str:
    """The parts and the presets, for `bin/trainer --help loss`."""
    rows = [(name, formula) for name, (formula, _) in OBJECTIVES.items()]
    lines = [HELP, "loss.objective, per token:", *_table(rows), "", "loss.name:"]
    for name, preset in PRESETS.items():
        settings = ", ".join(f"{option} {value}" for option, value in preset.settings.items())
        lines += _table([(name, f"{settings} ({preset.source})")])
    return "\n".join(lines) + "\n"


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Two columns, at most 100 characters wide."""
    return [
        textwrap.fill(
            text, 100, initial_indent=f"  {name:<20} ", subsequent_indent=" " * 23,
            break_on_hyphens=False,
        )
        for name, text in rows
    ]  # fmt: skip
