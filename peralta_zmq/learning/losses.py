"""Loss functions for policy optimization, on the tokens of one micro-batch.

Each loss of this package is `policy_loss` with settings of [loss]. A custom loss is a function

    def name(tokens: Tokens, *, option: float = ...) -> (scalar, metrics)

with the options loss.kwargs and without state. The trainer takes the gradient through `logprobs`
and `entropy` only, and may call the loss again with a part of the rollouts. Loss and metrics divide
by `tokens.step_tokens` or `tokens.step_sequences`, the totals of the whole update: the trainer adds
the results of all micro-batches and ranks.

Notation, per token: pi = logprobs, mu = old_logprobs, prox = prox_logprobs, ref = ref_logprobs,
teacher = teacher_logprobs, A = advantages, lr = pi - mu, r = exp(lr). sg[x] is x without gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from peralta_zmq.config.objective_sections import LossSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.named_losses import LOSSES, NamedLoss

# Bounds of |lr|, so that the ratio of a very improbable token stays finite.
MAX_LOG_RATIO = 20.0  # default
STRICT_LOG_RATIO = 10.0  # in GRPO's ratio of a token, and in PipelineRL's k3


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N generated tokens of one micro-batch; every tensor has the shape [N]."""

    logprobs: Tensor  # float32, by the policy, with gradient
    old_logprobs: Tensor  # float32, by the weights that sampled the token
    advantages: Tensor  # float32, advantage of the token's rollout or turn
    mask: Tensor  # float32, 1, or 0 for a token that counts in no loss and no metric
    sequence: Tensor  # int64, index of the token's rollout in this micro-batch
    num_sequences: int  # rollouts in this micro-batch
    step_tokens: float  # unmasked tokens of the whole update on all ranks, at least 1
    step_sequences: float  # rollouts with an unmasked token in the whole update, at least 1
    prox_logprobs: Tensor | None = None
    """By the policy before the first update of the step: in the only update of a step, `logprobs`
    without gradient. The trainer always sets the field; a direct call may omit it."""
    ref_logprobs: Tensor | None = None  # by the reference model, if the run has one
    teacher_logprobs: Tensor | None = None  # by the teacher model, if the run has one
    entropy: Tensor | None = None  # of the policy's distribution, with gradient, for entropy_coef
    selected: Tensor | None = None  # bool, False for tokens that selection.py leaves out


Metrics: TypeAlias = dict[str, Tensor]
TokenLoss: TypeAlias = Callable[[Tokens], tuple[Tensor, Metrics]]


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss, and its gradients with respect to the logprobs and the entropy."""

    tokens: Tokens
    value: Tensor
    metrics: Metrics  # without gradient, like `value`
    inputs: list[Tensor]  # the logprobs; also the entropy if it was computed
    gradients: tuple[Tensor, ...]  # of `value`, one per input

    @property
    def is_finite(self) -> bool:
        return bool(torch.stack([t.isfinite().all() for t in (self.value, *self.gradients)]).all())

    def backward(self) -> None:
        torch.autograd.backward(self.inputs, self.gradients)


def evaluate(loss: TokenLoss, tokens: Tokens) -> LossResult:
    """Call the loss and differentiate it with respect to the logprobs and the entropy."""
    value, metrics = loss(tokens)
    inputs = [tensor for tensor in (tokens.logprobs, tokens.entropy) if tensor is not None]
    gradients = torch.autograd.grad(value, inputs, materialize_grads=True)
    detached = {name: metric.detach() for name, metric in metrics.items()}
    return LossResult(tokens, value.detach(), detached, inputs, gradients)


# The loss


def preset(name: str, **options: Any) -> TokenLoss:
    """The named loss with some settings of [loss] changed. Raises ConfigError."""
    return make_loss(LossSection(name=name, **options))


def make_loss(section: LossSection, *, max_completion_length: int = 1) -> TokenLoss:
    """`policy_loss` with the settings of a named loss; the length is for aggregation constant."""

    def loss(tokens: Tokens) -> tuple[Tensor, Metrics]:
        return policy_loss(tokens, section, max_completion_length=max_completion_length)

    loss.__name__ = section.name
    return loss


def policy_loss(
    tokens: Tokens, section: LossSection, *, max_completion_length: int = 1
) -> tuple[Tensor, Metrics]:
    """The loss of [loss]: the aggregate over tokens of

        keep w objective(r, A) + kl_tau lr^2 + beta kl

    Raises ConfigError if the logprobs of a reference model or teacher are needed, but missing.
    """
    loss = LOSSES[section.name]
    old = tokens.old_logprobs
    weight = None
    metrics = dict[str, Tensor]()
    if section.importance_sampling_mode and tokens.prox_logprobs is not None:
        old = tokens.prox_logprobs
        weight, metrics = _off_policy_weight(tokens, tokens.prox_logprobs, section)
    log_ratio = tokens.logprobs - old
    ratio = _ratio(tokens, log_ratio, loss.objective, section)
    advantages = _advantages(tokens, loss, section)
    if loss.objective == "vespo":
        scale = _vespo_scale(tokens, log_ratio, weight)
        per_token = -scale * advantages * tokens.logprobs
    else:
        per_token, clipped = _objective(loss.objective, ratio, advantages, tokens.logprobs, section)
        per_token = per_token if weight is None else per_token * weight
        is_by_token = section.importance_sampling_level == "token"
        mean = token_mean if is_by_token else _rollout_mean
        metrics |= {name: mean(tokens, flags) for name, flags in clipped.items()}
    if (masks := _masks(tokens, advantages, loss, section)) is not None:
        masked, mask_metrics = masks
        per_token = per_token * ~masked
        metrics |= mask_metrics
    if section.kl_tau and loss.objective != "importance":
        per_token = per_token + section.kl_tau * (tokens.logprobs - tokens.old_logprobs) ** 2
    if section.beta:
        reference = _required(tokens.ref_logprobs, "beta", model="reference")
        kl = kl_estimate(reference - tokens.logprobs)
        kl = kl * ratio if loss.corrects_kl else kl
        per_token = per_token + section.beta * kl
        metrics["kl"] = token_mean(tokens, kl.detach())
    if section.aggregation == "token":
        return token_mean(tokens, per_token), metrics
    if section.aggregation == "rollout":
        return _rollout_mean(tokens, per_token), metrics
    total = (per_token * tokens.mask).sum() / tokens.step_sequences
    return total / (max_completion_length if section.aggregation == "constant" else 1), metrics


def with_entropy_bonus(loss: TokenLoss, coefficient: float) -> TokenLoss:
    """Wrap a loss: subtract `coefficient` times the mean entropy, `tokens.entropy`."""

    @functools.wraps(getattr(loss, "func", loss))  # error messages name the wrapped loss
    def with_bonus(tokens: Tokens) -> tuple[Tensor, Metrics]:
        value, metrics = loss(tokens)
        assert tokens.entropy is not None, "the learner needs compute_with_entropy for the bonus"
        entropy = token_mean(tokens, tokens.entropy)
        return value - coefficient * entropy, {**metrics, "entropy": entropy}

    return with_bonus


# Parts: the objective, the advantage, the ratio, the off-policy correction and the masks


def _objective(
    name: str, ratio: Tensor, advantages: Tensor, logprobs: Tensor, section: LossSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss [N] of a token from r, A and pi; and bool [N] by metric, True for clipped tokens.

    ppo has the metrics of TRL. Its delta is that of arXiv 2505.07291, and of 1912.09729 (dual clip)
    where A < 0. The soft clip of sapo has at r = 1 the gradient of -A r.
    """
    if name == "on_policy":  # the value is -A, the gradient that of reinforce
        return -advantages * (logprobs - logprobs.detach()).exp(), {}
    if name == "ratio":
        return -advantages * ratio, {}
    if name == "ppo":
        low = 1 - section.epsilon
        high = 1 + (section.epsilon if section.epsilon_high is None else section.epsilon_high)
        clipped = ratio.clamp(low, high)
        if section.delta is not None:
            ratio = ratio.clamp(max=section.delta)
        return torch.maximum(-ratio * advantages, -clipped * advantages), {
            "clip_ratio/low_mean": (ratio.detach() < low) & (advantages < 0),
            "clip_ratio/high_mean": (ratio.detach() > high) & (advantages > 0),
        }
    if name == "sapo":
        temperature = torch.where(advantages > 0, 1.0, 1.05).to(ratio.dtype)
        return -advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature, {}
    weight = ratio.detach()
    if name == "importance":
        is_of_rollout = section.importance_sampling_level == "sequence_product"
        weight = weight.clamp(max=10.0 if is_of_rollout else math.inf)  # as in prime-rl
        return -weight * (advantages * logprobs), {}
    if name == "cispo":
        limit = section.epsilon_high or math.inf
    elif section.epsilon_high is None:
        return -advantages * logprobs, {}
    else:
        limit = 1 + section.epsilon_high
    flags = {"clip_ratio/high_mean": weight > limit}
    return -weight.clamp(max=limit) * (advantages * logprobs), flags


@torch.no_grad()
def _vespo_scale(tokens: Tokens, log_ratio: Tensor, weight: Tensor | None) -> Tensor:
    """W^k exp(l (1 - W)) with TRL's k and l, [N]; W is the product of r and w over the rollout."""
    lowest = math.log(1e-8)
    total = sequence_sum(tokens, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if weight is not None:
        total = total + sequence_sum(tokens, weight.log().clamp(lowest, MAX_LOG_RATIO))
    log_product = total.clamp(lowest, MAX_LOG_RATIO)[tokens.sequence]
    is_positive = tokens.advantages >= 0
    exponent = torch.where(is_positive, 2.0, 3.0)
    decay = torch.where(is_positive, 3.0, 2.0)
    return (exponent * log_product + decay * (1 - log_product.exp())).exp()


def _advantages(tokens: Tokens, loss: NamedLoss, section: LossSection) -> Tensor:
    """A = advantage + teacher_tau (teacher - pi) [N]; for importance also - kl_tau lr."""
    advantages = tokens.advantages if loss.uses_rewards else 0.0 * tokens.advantages
    policy = tokens.logprobs.detach()
    if section.teacher_tau:
        teacher = _required(tokens.teacher_logprobs, "teacher_tau", model="teacher")
        advantages = advantages + section.teacher_tau * (teacher - policy)
    if section.kl_tau and loss.objective == "importance":
        advantages = advantages - section.kl_tau * (policy - tokens.old_logprobs)
    return advantages


def _ratio(tokens: Tokens, log_ratio: Tensor, objective: str, section: LossSection) -> Tensor:
    """r of each token, [N]: of the token, or the mean (geometric) or product over its rollout."""
    if section.importance_sampling_level == "token":
        limit = STRICT_LOG_RATIO if objective == "ppo" else MAX_LOG_RATIO
        return ratio_of(log_ratio, limit=limit)
    by_mean = section.importance_sampling_level == "sequence_mean"
    reduced = (sequence_mean if by_mean else sequence_sum)(tokens, log_ratio)
    return ratio_of(reduced)[tokens.sequence]


def _off_policy_weight(
    tokens: Tokens, prox: Tensor, section: LossSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = exp(prox - mu) of the token or its whole rollout, [N], truncated or masked.

    TRL's vLLM importance sampling correction; token_mask is that of AReaL (decoupled PPO).
    """
    level, _, kind = (section.importance_sampling_mode or "").partition("_")
    log_weight = (prox - tokens.old_logprobs).detach()
    if level == "sequence":
        log_weight = sequence_sum(tokens, log_weight)[tokens.sequence]
    weight = ratio_of(log_weight)
    high = section.importance_sampling_clip_max
    if high is None:
        return weight, {}
    if kind == "truncate":
        return weight.clamp(max=high), {}
    outside = weight > high
    metrics = {"masked/importance_sampling": token_mean(tokens, outside)}
    return weight * ~outside, metrics


def _masks(
    tokens: Tokens, advantages: Tensor, loss: NamedLoss, section: LossSection
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """True for the tokens that a mask leaves out, bool [N], and metrics; None without masks."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    by_token = _token_masks(tokens, log_ratio, advantages, loss, section)
    by_rollout = _rollout_masks(tokens, log_ratio, loss, section)
    masks = [*by_token.values(), *(flags[tokens.sequence] for flags in by_rollout.values())]
    if tokens.selected is not None:
        masks.append(~tokens.selected)
    if not masks:
        return None
    masked = torch.stack(masks).any(0)
    return masked, {
        "masked/mean": token_mean(tokens, masked),
        **{name: token_mean(tokens, flags) for name, flags in by_token.items()},
        **{name: flags.sum() / tokens.step_sequences for name, flags in by_rollout.items()},
    }


def _token_masks(
    tokens: Tokens, log_ratio: Tensor, advantages: Tensor, loss: NamedLoss, section: LossSection
) -> dict[str, Tensor]:
    """Tokens to leave out by metric, bool [N], by the change of their probability."""
    low = list[Tensor]()
    high = list[Tensor]()
    if loss.mask is not None:
        kind, bound = loss.mask
        change = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
        is_positive = advantages > 0
        low.append((change < -bound) & ~(is_positive & (kind == "dppo")))
        if kind != "fall":
            high.append((change > bound) & (is_positive | (kind == "ipo")))
    if section.token_mask is not None:
        ratio = ratio_of(log_ratio)
        low.append(ratio < section.token_mask[0])
        high.append(ratio > section.token_mask[1])
    sides = {"masked/token_low": low, "masked/token_high": high}
    return {name: torch.stack(flags).any(0) for name, flags in sides.items() if flags}


def _rollout_masks(
    tokens: Tokens, log_ratio: Tensor, loss: NamedLoss, section: LossSection
) -> dict[str, Tensor]:
    """Rollouts to leave out by metric, bool [num_sequences].

    off_policy_mask_threshold is one for the mean of mu - pi if A < 0 (DeepSeek-V3.2, TRL).
    """
    masks = dict[str, Tensor]()
    if loss.objective == "importance":  # bounds of Surogate and prime-rl
        mean_ratio = ratio_of(sequence_mean(tokens, log_ratio))
        masks["masked/geo"] = (mean_ratio < 0.1) | (mean_ratio > 10.0)
        is_outlier = ratio_of(log_ratio) > 100.0
        masks["masked/sequence"] = sequence_sum(tokens, is_outlier) > 0
    if section.off_policy_mask_threshold is not None:
        is_negative = sequence_mean(tokens, tokens.advantages) < 0
        change = -sequence_mean(tokens, log_ratio)
        masks["masked/off_policy"] = is_negative & (change > section.off_policy_mask_threshold)
    return masks


def _required(logprobs: Tensor | None, option: str, *, model: str) -> Tensor:
    """Return `logprobs`; ConfigError if the run has no such model."""
    if logprobs is None:
        raise ConfigError(
            f"loss.{option} above 0 needs the logprobs of a {model} model, but this run has none; "
            f"set loss.{option} to 0"
        )
    return logprobs


def _rollout_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """This micro-batch's term of the mean over rollouts of the mean over their tokens."""
    return sequence_mean(tokens, values).sum() / tokens.step_sequences


# Shared terms


def of_rollouts(tokens: Tokens, keep: Tensor) -> Tokens:
    """The tokens of the rollouts that `keep`, bool [num_sequences], selects."""
    is_kept = keep[tokens.sequence]  # [N]
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    kept = {name: value[is_kept] for name, value in values.items() if isinstance(value, Tensor)}
    # The kept rollouts get new indices, 0 and up.
    kept["sequence"] = (keep.cumsum(0) - 1)[kept["sequence"]]
    return replace(tokens, **kept, num_sequences=int(keep.sum()))


def ratio_of(log_ratio: Tensor, *, limit: float = MAX_LOG_RATIO) -> Tensor:
    """exp(log_ratio), clamped to +-limit first; no gradient beyond the limit."""
    return log_ratio.clamp(-limit, limit).exp()


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """k3 estimate of a KL divergence (J. Schulman, "Approximating KL divergence", 2020).

    e^x - x - 1 for x = log_ratio within +-10; no gradient beyond the limit.
    """
    x = log_ratio.clamp(-STRICT_LOG_RATIO, STRICT_LOG_RATIO)
    return x.exp() - x - 1


def token_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """This micro-batch's term of the mean over all unmasked tokens of the update."""
    return (values * tokens.mask).sum() / tokens.step_tokens


def sequence_sum(tokens: Tokens, values: Tensor) -> Tensor:
    """Sum over the unmasked tokens of each rollout; [num_sequences]."""
    masked = values * tokens.mask.to(tokens.logprobs.dtype)
    return masked.new_zeros(tokens.num_sequences).index_add(0, tokens.sequence, masked)


def sequence_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each rollout, or 0; [num_sequences]."""
    lengths = sequence_sum(tokens, torch.ones_like(tokens.logprobs)).clamp(min=1)
    return sequence_sum(tokens, values) / lengths
