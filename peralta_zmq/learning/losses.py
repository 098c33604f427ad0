"""Loss functions for policy optimization, on the tokens of one micro-batch.

A rollout is a prompt with one completion. The policy is the model in training. A training step has
one parameter update, or several (train.num_minibatches, train.num_iterations). An update adds the
gradients of its micro-batches, each of which fits into memory.

Each loss of this package is `policy_loss` with other parts; composition.py has the parts and the
named losses, objectives.py the losses of a token. A loss outside this package is a function

    def name(tokens: Tokens, *, option: float = ...) -> (scalar, metrics)

named by its import path. It gets its keywords from loss.kwargs.

The trainer takes the gradient through `logprobs` and `entropy` only. It may call the loss again
with a part of the rollouts, if the loss of all is not finite, so a loss must keep no state.

The loss and its metrics divide by `tokens.step_tokens` or `tokens.step_sequences`, the totals of
the whole update. The trainer adds the results of all micro-batches and ranks, so their
number and order do not change the gradient.

Notation, per token: pi = logprobs, mu = old_logprobs, prox = prox_logprobs, ref = ref_logprobs,
teacher = teacher_logprobs, A = advantages, lr = pi - mu, r = exp(lr). sg[x] is x without gradient.
mean is the mean over all unmasked tokens of the update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from peralta_zmq.errors import ConfigError
from peralta_zmq.learning import objectives
from peralta_zmq.learning.composition import Composition, compose

# Bounds of |lr|, so that the ratio of a very improbable token stays finite.
MAX_LOG_RATIO = 20.0  # default
STRICT_LOG_RATIO = 10.0  # in GRPO's ratio of a token, and in PipelineRL's k3
MAX_KL = 10.0  # of the estimate for one token, in async-grpo
VESPO_MIN, VESPO_MAX = math.log(1e-8), 20.0  # bounds of log ratios in TRL's vespo


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
    """By the policy before the first update of the step. If the step has only one update, they are
    `logprobs` without gradient. The trainer always sets the field; a direct call may omit it."""
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
        """True if the value and all gradients are finite."""
        return bool(torch.stack([t.isfinite().all() for t in (self.value, *self.gradients)]).all())

    def backward(self) -> None:
        """Accumulate the gradients of the policy's parameters."""
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
    """The named loss of `composition.PRESETS` with some options changed.

    Raises ConfigError as `compose` does.
    """
    return composed(name, compose(name, options))


def composed(name: str, parts: Composition) -> TokenLoss:
    """`policy_loss` with its parts bound; `name` is for error messages."""

    def loss(tokens: Tokens) -> tuple[Tensor, Metrics]:
        return policy_loss(tokens, parts)

    loss.__name__ = name
    return loss


def policy_loss(tokens: Tokens, parts: Composition) -> tuple[Tensor, Metrics]:
    """The loss that the parts describe: the aggregate over tokens of

        keep w objective(r, A) + kl_tau lr^2 + beta kl

    A, r, w and keep are those of the functions below; composition.OBJECTIVES has the objectives.
    Raises ConfigError if the logprobs of a reference model or teacher are needed, but missing.
    """
    old = tokens.old_logprobs
    weight = None
    metrics = dict[str, Tensor]()
    if parts.importance_sampling_mode and tokens.prox_logprobs is not None:
        old = tokens.prox_logprobs
        weight, metrics = _off_policy_weight(tokens, tokens.prox_logprobs, parts)
    log_ratio = tokens.logprobs - old
    ratio = _ratio(tokens, log_ratio, parts)
    advantages = _advantages(tokens, parts)
    if parts.objective == "vespo":
        scale = _vespo_scale(tokens, log_ratio, weight, parts)
        per_token = -scale * advantages * tokens.logprobs
    else:
        objective = objectives.FUNCTIONS[parts.objective]
        per_token, clipped = objective(ratio, advantages, tokens.logprobs, parts)
        per_token = per_token if weight is None else per_token * weight
        is_by_token = parts.importance_sampling_level == "token"
        mean = token_mean if is_by_token else _rollout_mean
        metrics |= {name: mean(tokens, flags) for name, flags in clipped.items()}
    if parts.has_masks or tokens.selected is not None:
        masked, mask_metrics = _masked(tokens, advantages, parts)
        per_token = per_token * ~masked
        metrics = metrics | mask_metrics
    if parts.kl_tau and parts.objective != "importance":
        per_token = per_token + parts.kl_tau * (tokens.logprobs - tokens.old_logprobs) ** 2
    if parts.beta:
        kl = _kl(tokens, ratio, parts)
        per_token = per_token + parts.beta * kl
        metrics["kl"] = token_mean(tokens, kl.detach())
    return AGGREGATIONS[parts.aggregation](tokens, per_token, parts), metrics


def with_entropy_bonus(loss: TokenLoss, coefficient: float) -> TokenLoss:
    """Wrap a loss: subtract `coefficient` times the mean entropy, `tokens.entropy`."""

    @functools.wraps(getattr(loss, "func", loss))  # error messages name the wrapped loss
    def with_bonus(tokens: Tokens) -> tuple[Tensor, Metrics]:
        value, metrics = loss(tokens)
        assert tokens.entropy is not None, "the learner needs compute_with_entropy for the bonus"
        entropy = token_mean(tokens, tokens.entropy)
        return value - coefficient * entropy, {**metrics, "entropy": entropy}

    return with_bonus


# Parts: the advantage, the ratio, the off-policy correction and the masks


def _advantages(tokens: Tokens, parts: Composition) -> Tensor:
    """A = adv_tau advantage + teacher_tau (teacher - pi) [N]; for importance also - kl_tau lr."""
    advantages = parts.adv_tau * tokens.advantages
    policy = tokens.logprobs.detach()
    if parts.teacher_tau:
        teacher = _required(tokens.teacher_logprobs, "teacher_tau", model="teacher")
        advantages = advantages + parts.teacher_tau * (teacher - policy)
    if parts.kl_tau and parts.objective == "importance":
        advantages = advantages - parts.kl_tau * (policy - tokens.old_logprobs)
    return advantages


def _ratio(tokens: Tokens, log_ratio: Tensor, parts: Composition) -> Tensor:
    """r of each token, [N]: of the token, or the mean (geometric) or product over its rollout."""
    if parts.importance_sampling_level == "token":
        limit = STRICT_LOG_RATIO if parts.objective == "ppo" else MAX_LOG_RATIO
        return ratio_of(log_ratio, limit=limit)
    by_mean = parts.importance_sampling_level == "sequence"
    reduced = (sequence_mean if by_mean else sequence_sum)(tokens, log_ratio)
    return ratio_of(reduced)[tokens.sequence]


def _off_policy_weight(
    tokens: Tokens, prox: Tensor, parts: Composition
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = exp(prox - mu) of the token or its whole rollout, [N], truncated or masked at bounds.

    TRL's vLLM importance sampling correction; token_mask is that of AReaL (decoupled PPO).
    """
    level, _, kind = (parts.importance_sampling_mode or "").partition("_")
    log_weight = (prox - tokens.old_logprobs).detach()
    if level == "sequence":
        log_weight = sequence_sum(tokens, log_weight)[tokens.sequence]
    weight = ratio_of(log_weight)
    low = parts.importance_sampling_clip_min
    high = parts.importance_sampling_clip_max
    if low is None and high is None:
        return weight, {}
    if kind == "truncate":
        return weight.clamp(low, high), {}
    outside = _outside(weight, low, high)
    metrics = {"masked/importance_sampling": token_mean(tokens, outside)}
    return weight * ~outside, metrics


def _masked(
    tokens: Tokens, advantages: Tensor, parts: Composition
) -> tuple[Tensor, dict[str, Tensor]]:
    """True for the tokens that a mask leaves out, bool [N], and metrics."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    by_token = _token_masks(tokens, log_ratio, advantages, parts)
    by_rollout = _rollout_masks(tokens, log_ratio, parts)
    masks = [*by_token.values(), *(flags[tokens.sequence] for flags in by_rollout.values())]
    if tokens.selected is not None:
        masks.append(~tokens.selected)
    masked = torch.stack(masks).any(0)
    return masked, {
        "masked/mean": token_mean(tokens, masked),
        **{name: token_mean(tokens, flags) for name, flags in by_token.items()},
        **{name: flags.sum() / tokens.step_sequences for name, flags in by_rollout.items()},
    }


def _token_masks(
    tokens: Tokens, log_ratio: Tensor, advantages: Tensor, parts: Composition
) -> dict[str, Tensor]:
    """Tokens to leave out by metric, bool [N], by the change of their probability.

    token_mask has bounds for the ratio; the other options limit the difference: dppo_mask for the
    sign of A, ipo_threshold in both directions, one_sided_threshold downwards.
    """
    ratio = ratio_of(log_ratio)
    is_positive = advantages > 0
    change = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    limits = [  # limit of the fall, limit of the rise, tokens that they apply to
        (parts.dppo_mask_low, None, ~is_positive),
        (None, parts.dppo_mask_high, is_positive),
        (parts.ipo_threshold, parts.ipo_threshold, True),
        (parts.one_sided_threshold, None, True),
    ]
    low = [(change < -fall) & chosen for fall, _, chosen in limits if fall is not None]
    high = [(change > rise) & chosen for _, rise, chosen in limits if rise is not None]
    if parts.token_mask_low is not None:
        low.append(ratio < parts.token_mask_low)
    if parts.token_mask_high is not None:
        high.append(ratio > parts.token_mask_high)
    sides = {"masked/token_low": low, "masked/token_high": high}
    return {name: torch.stack(flags).any(0) for name, flags in sides.items() if flags}


def _rollout_masks(tokens: Tokens, log_ratio: Tensor, parts: Composition) -> dict[str, Tensor]:
    """Rollouts to leave out by metric, bool [num_sequences].

    geo_mask has bounds for the geometric mean of the ratios, sequence_mask for each of them;
    off_policy_mask_threshold is one for the mean of mu - pi if A < 0 (DeepSeek-V3.2, TRL), and
    kl_mask_high one for the mean k3 estimate of KL(mu || pi) (AReaL, verl).
    """
    masks = dict[str, Tensor]()
    mean = sequence_mean(tokens, log_ratio)
    if parts.geo_mask_low is not None or parts.geo_mask_high is not None:
        masks["masked/geo"] = _outside(ratio_of(mean), parts.geo_mask_low, parts.geo_mask_high)
    if parts.sequence_mask_low is not None or parts.sequence_mask_high is not None:
        ratio = ratio_of(log_ratio)
        extreme = _outside(ratio, parts.sequence_mask_low, parts.sequence_mask_high)
        masks["masked/sequence"] = sequence_sum(tokens, extreme) > 0
    if parts.off_policy_mask_threshold is not None:
        is_negative = sequence_mean(tokens, tokens.advantages) < 0
        masks["masked/off_policy"] = is_negative & (-mean > parts.off_policy_mask_threshold)
    if parts.kl_mask_high is not None:
        kl = sequence_mean(tokens, kl_estimate(log_ratio))
        masks["masked/kl"] = kl > parts.kl_mask_high
    return masks


def _outside(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """True for values below `low` or above `high`; None = no bound."""
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    return (values < low) | (values > high)


# Parts: the objective of VESPO


@torch.no_grad()
def _vespo_scale(
    tokens: Tokens, log_ratio: Tensor, weight: Tensor | None, parts: Composition
) -> Tensor:
    """W^k exp(l (1 - W)), [N]; W = product of r and w over the token's rollout, within bounds."""
    total = sequence_sum(tokens, log_ratio.clamp(-VESPO_MAX, VESPO_MAX))
    if weight is not None:
        total = total + sequence_sum(tokens, weight.log().clamp(VESPO_MIN, VESPO_MAX))
    log_product = total.clamp(VESPO_MIN, VESPO_MAX)[tokens.sequence]
    is_positive = tokens.advantages >= 0
    k = torch.where(is_positive, parts.vespo_k_pos, parts.vespo_k_neg)
    decay = torch.where(is_positive, parts.vespo_lambda_pos, parts.vespo_lambda_neg)
    return (k * log_product + decay * (1 - log_product.exp())).exp()


# Parts: the KL term and the aggregation


def _kl(tokens: Tokens, ratio: Tensor, parts: Composition) -> Tensor:
    """Estimate of KL(policy || kl_model) per token, [N]; times r if its bias is corrected."""
    logprobs = tokens.ref_logprobs if parts.kl_model == "reference" else tokens.teacher_logprobs
    log_ratio = _required(logprobs, "beta", model=parts.kl_model) - tokens.logprobs
    kl = kl_estimate(log_ratio, estimator=parts.kl_estimator, clamp=parts.kl_clamp)
    return kl * ratio if parts.use_bias_correction_kl else kl


def _required(logprobs: Tensor | None, option: str, *, model: str) -> Tensor:
    """Return `logprobs`. Raises ConfigError if None: the run has no such model."""
    if logprobs is None:
        raise ConfigError(
            f"loss.{option} above 0 needs the logprobs of a {model} model, but this run has none; "
            f"set loss.{option} to 0"
        )
    return logprobs


def _rollout_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """This micro-batch's term of the mean over rollouts of the mean over their tokens."""
    return sequence_mean(tokens, values).sum() / tokens.step_sequences


def _rollout_sum(tokens: Tokens, values: Tensor) -> Tensor:
    """This micro-batch's term of the mean over rollouts of the sum over their tokens."""
    return (values * tokens.mask).sum() / tokens.step_sequences


AGGREGATIONS: dict[str, Callable[[Tokens, Tensor, Composition], Tensor]] = {
    "token": lambda tokens, values, _: token_mean(tokens, values),
    "rollout": lambda tokens, values, _: _rollout_mean(tokens, values),
    "sum": lambda tokens, values, _: _rollout_sum(tokens, values),
    "constant": lambda tokens, values, parts: (
        _rollout_sum(tokens, values) / parts.max_completion_length
    ),
}


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


def kl_estimate(log_ratio: Tensor, *, estimator: str = "k3", clamp: str = "log_ratio") -> Tensor:
    """Estimate of a KL divergence per token, for x = log_ratio: -x, x^2 / 2 or e^x - x - 1.

    `clamp` limits x, or the estimate, to +-10; no gradient beyond the limit. J. Schulman,
    "Approximating KL divergence", 2020.
    """
    # k3 is above its limit for x beyond +-20, which keep its gradient finite.
    limit = STRICT_LOG_RATIO if clamp == "log_ratio" else MAX_LOG_RATIO
    x = log_ratio.clamp(-limit, limit)
    kl = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - x - 1}[estimator]
    return kl if clamp == "log_ratio" else kl.clamp(-MAX_KL, MAX_KL)


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
