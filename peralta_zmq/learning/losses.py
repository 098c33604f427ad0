"""Loss functions for policy optimization, on the tokens of one micro-batch.

A rollout is a prompt with one completion. The policy is the model in training. A training step has
one parameter update, or several (train.num_minibatches, train.num_iterations). An update adds the
gradients of its micro-batches, each of which fits into memory.

To add a loss, write a function here and add its line to the table in `registry.py`
(CONTRIBUTING.md lists its tests, documents and benchmark):

    def name(tokens: Tokens, *, option: float = ...) -> (scalar, metrics)

Each new keyword also needs a field in `LossSection` (config/training_sections.py), because unknown
settings are rejected; a keyword that weights a term with `ref_logprobs` or `teacher_logprobs` also
a line in `REQUIRED_MODELS` (build.py), which loads the model. Checks of combinations of options go
into `check_loss_options`. A loss outside this package, named by its import path, gets its keywords
from loss.kwargs.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from peralta_zmq.errors import ConfigError

# Bounds of |lr|, so that the ratio of a very improbable token stays finite.
MAX_LOG_RATIO = 20.0  # default
STRICT_LOG_RATIO = 10.0  # in the published formulas of GRPO and importance; PipelineRL's in k3
MAX_K3 = 10.0  # in async-grpo


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N generated tokens of one micro-batch; every tensor has the shape [N]."""

    logprobs: Tensor  # float32, by the policy, with gradient
    old_logprobs: Tensor  # float32, by the weights that sampled the token
    advantages: Tensor  # float32, advantage of the token's rollout
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


KlClamp: TypeAlias = Literal["log_ratio", "estimate"]
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


# Losses


def reinforce(tokens: Tokens, *, epsilon_high: float | None = None) -> tuple[Tensor, Metrics]:
    """REINFORCE: -mean(A pi).

    `epsilon_high` weights each token with sg[clamp(r, 0, 1 + epsilon_high)] (PipelineRL uses 0.02).
    """
    objective = tokens.advantages * tokens.logprobs
    if epsilon_high is None:
        return -token_mean(tokens, objective), {}
    ratio = ratio_of((tokens.logprobs - tokens.old_logprobs).detach())
    clipped = (ratio > 1 + epsilon_high).to(ratio.dtype)
    loss = -token_mean(tokens, ratio.clamp(0, 1 + epsilon_high) * objective)
    return loss, {"clip_ratio/high_mean": token_mean(tokens, clipped)}


def grpo(
    tokens: Tokens,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    c_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """GRPO without KL: -mean(min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)).

    lr is clamped to +-10; arXiv 2402.03300. `c_clip` > 1 bounds the loss of a token with A < 0 by
    c_clip |A| (dual clip, arXiv 1912.09729).
    """
    ratio = ratio_of(tokens.logprobs - tokens.old_logprobs, limit=STRICT_LOG_RATIO)
    per_token, clipped = _ppo_clip(ratio, tokens.advantages, epsilon, epsilon_high, c_clip)
    return token_mean(tokens, per_token), _token_means(tokens, clipped)


def decoupled_ppo(
    tokens: Tokens,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    c_clip: float | None = None,
    use_decoupled_loss: bool = True,
    behav_imp_weight_cap: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Decoupled PPO (AReaL): mean(w max(-A r, -A clip(r))).

    Here r = exp(pi - prox), and the weight w = exp(prox - mu). A weight above
    `behav_imp_weight_cap` becomes 0; the token still counts in the mean. Without prox, or without
    `use_decoupled_loss`, the loss is that of PPO, with r = exp(pi - mu) and w = 1.
    """
    prox = tokens.prox_logprobs if use_decoupled_loss else None
    proximal = tokens.old_logprobs if prox is None else prox
    ratio, weight = ratio_of(tokens.logprobs - proximal), ratio_of(proximal - tokens.old_logprobs)
    per_token, metrics = _ppo_clip(ratio, tokens.advantages, epsilon, epsilon_high, c_clip)
    if behav_imp_weight_cap is not None:
        capped = (weight > behav_imp_weight_cap).to(weight.dtype)
        weight = weight * (1 - capped)
        metrics["masked/behav_imp_weight"] = capped
    return token_mean(tokens, per_token * weight), _token_means(tokens, metrics)


def gspo(
    tokens: Tokens, *, epsilon: float = 3e-4, epsilon_high: float | None = 4e-4
) -> tuple[Tensor, Metrics]:
    """GSPO: the mean over rollouts of -min(s A, clip(s) A).

    s = exp(mean lr of the rollout). arXiv 2507.18071, with the clip bounds of the paper.
    """
    ratio = ratio_of(sequence_mean(tokens, tokens.logprobs - tokens.old_logprobs))
    # A rollout without an unmasked token has ratio 1 and advantage 0 and adds nothing.
    advantages = sequence_mean(tokens, tokens.advantages)
    per_sequence, clipped = _ppo_clip(ratio, advantages, epsilon, epsilon_high)
    return per_sequence.sum() / tokens.step_sequences, {
        name: value.sum() / tokens.step_sequences for name, value in clipped.items()
    }


def grpo_kl(
    tokens: Tokens, *, beta: float = 0.001, kl_clamp: KlClamp = "log_ratio"
) -> tuple[Tensor, Metrics]:
    """On-policy GRPO with KL: -exp(pi - sg[pi]) A + beta k3(ref - pi) (async-grpo).

    This is averaged over the tokens of each rollout, then over rollouts. `kl_clamp` limits the log
    ratio to +-10 (PipelineRL), or k3 to 10 (async-grpo). Raises ConfigError without reference
    logprobs, unless beta is 0.
    """
    per_token = -(tokens.logprobs - tokens.logprobs.detach()).exp() * tokens.advantages
    metrics: Metrics = {}
    if beta:
        reference = _required(tokens.ref_logprobs, "grpo_kl", "beta", model="reference")
        kl = k3(reference - tokens.logprobs, clamp=kl_clamp)
        per_token = per_token + beta * kl
        metrics["kl"] = token_mean(tokens, kl.detach())
    return sequence_mean(tokens, per_token).sum() / tokens.step_sequences, metrics


def importance(
    tokens: Tokens,
    *,
    ratio_type: Literal["token", "sequence"] = "token",
    token_mask_low: float = 0.125,
    token_mask_high: float = 8.0,
    geo_mask_low: float = 0.1,
    geo_mask_high: float = 10.0,
    sequence_mask_low: float = 0.0,
    sequence_mask_high: float = 100.0,
    sequence_clip_high: float = 10.0,
    adv_tau: float = 1.0,
    teacher_tau: float = 0.0,
    kl_tau: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Masked importance sampling (Surogate, prime-rl).

    -mean(keep sg[w (adv_tau A + teacher_tau (teacher - pi) - kl_tau lr)] pi)

    keep is 0 for a masked token, else 1; masked tokens still count in the mean. A token is masked
    if one of these is out of bounds: its ratio r (token_mask), the geometric mean of the ratios of
    its rollout (geo_mask), or any ratio of its rollout (sequence_mask). With `ratio_type` token,
    w = r. With sequence, w = min(exp(sum of lr of the rollout), sequence_clip_high), and the loss
    averages over the tokens of each rollout, then over rollouts. Raises ConfigError without teacher
    logprobs, unless teacher_tau is 0.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    ratio = ratio_of(log_ratio)
    masked = {
        "masked/token_low": ratio < token_mask_low,
        "masked/token_high": ratio > token_mask_high,
    }
    mean_ratio = ratio_of(sequence_mean(tokens, log_ratio))  # [num_sequences]
    extreme = (ratio < sequence_mask_low) | (ratio > sequence_mask_high)  # [N]
    masked_sequences = {  # [num_sequences]
        "masked/geo": (mean_ratio < geo_mask_low) | (mean_ratio > geo_mask_high),
        "masked/sequence": sequence_sum(tokens, extreme.to(ratio.dtype)) > 0,
    }
    masked_by_sequence = [flags[tokens.sequence] for flags in masked_sequences.values()]
    is_masked = torch.stack([*masked.values(), *masked_by_sequence]).any(0)  # [N]
    signal = adv_tau * tokens.advantages - kl_tau * log_ratio
    if teacher_tau:
        teacher = _required(tokens.teacher_logprobs, "importance", "teacher_tau", model="teacher")
        signal = signal + teacher_tau * (teacher - tokens.logprobs.detach())
    weight = ratio
    if ratio_type == "sequence":
        summed = sequence_sum(tokens, log_ratio).clamp(max=STRICT_LOG_RATIO)
        weight = summed.exp().clamp(max=sequence_clip_high)[tokens.sequence]
    per_token = -(weight * signal * ~is_masked) * tokens.logprobs
    if ratio_type == "token":
        loss = token_mean(tokens, per_token)
    else:
        loss = sequence_mean(tokens, per_token).sum() / tokens.step_sequences
    return loss, {
        **_token_means(tokens, {"masked/mean": is_masked, **masked}),
        **{name: flags.sum() / tokens.step_sequences for name, flags in masked_sequences.items()},
    }


def dppo(
    tokens: Tokens,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    kl_tau: float = 1e-3,
) -> tuple[Tensor, Metrics]:
    """Divergence-masked PPO: mean(-keep A r + kl_tau lr^2) (prime-rl).

    keep is 0 for a masked token, else 1. A token is masked if its probability rose by more than
    `dppo_mask_high` and A > 0, or fell by more than `dppo_mask_low` and A <= 0.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    change = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    positive = tokens.advantages > 0
    low, high = (change < -dppo_mask_low) & ~positive, (change > dppo_mask_high) & positive
    gain = tokens.advantages * ratio_of(log_ratio) * ~(low | high)
    masked = {"masked/mean": low | high, "masked/token_low": low, "masked/token_high": high}
    return token_mean(tokens, kl_tau * log_ratio**2 - gain), _token_means(tokens, masked)


def with_entropy_bonus(loss: TokenLoss, coefficient: float) -> TokenLoss:
    """Wrap a loss: subtract `coefficient` times the mean entropy, `tokens.entropy`."""

    @functools.wraps(getattr(loss, "func", loss))  # error messages name the wrapped loss
    def with_bonus(tokens: Tokens) -> tuple[Tensor, Metrics]:
        value, metrics = loss(tokens)
        assert tokens.entropy is not None, "the learner needs compute_with_entropy for the bonus"
        entropy = token_mean(tokens, tokens.entropy)
        return value - coefficient * entropy, {**metrics, "entropy": entropy}

    return with_bonus


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


def k3(log_ratio: Tensor, *, clamp: KlClamp = "log_ratio") -> Tensor:
    """The k3 estimate of a KL divergence per token: e^x - x - 1.

    `clamp` limits x = log_ratio to +-10, or k3 to 10; no gradient beyond the limit. J. Schulman,
    "Approximating KL divergence", 2020.
    """
    # k3 is above 10 at the limits +-20, which keep its gradient finite.
    limit = STRICT_LOG_RATIO if clamp == "log_ratio" else MAX_LOG_RATIO
    log_ratio = log_ratio.clamp(-limit, limit)
    kl = log_ratio.exp() - log_ratio - 1
    return kl if clamp == "log_ratio" else kl.clamp(max=MAX_K3)


def token_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """This micro-batch's term of the mean over all unmasked tokens of the update."""
    return (values * tokens.mask).sum() / tokens.step_tokens


def _token_means(tokens: Tokens, values: Metrics) -> Metrics:
    """`token_mean` of each metric, which has a value or flag per token, [N]."""
    return {name: token_mean(tokens, value) for name, value in values.items()}


def sequence_sum(tokens: Tokens, values: Tensor) -> Tensor:
    """Sum over the unmasked tokens of each rollout; [num_sequences]."""
    sums = values.new_zeros(tokens.num_sequences)
    return sums.index_add(0, tokens.sequence, values * tokens.mask.to(values.dtype))


def sequence_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each rollout, or 0; [num_sequences]."""
    lengths = sequence_sum(tokens, torch.ones_like(tokens.logprobs)).clamp(min=1)
    return sequence_sum(tokens, values) / lengths


def _ppo_clip(
    ratio: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float | None,
    c_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's max(-r A, -clip(r) A), at most c_clip |A| where A < 0.

    The metrics have TRL's names; each is 1 where the clip removes the gradient, else 0.
    """
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    if c_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -c_clip * advantages), loss)
    clipped_low = (ratio.detach() < low) & (advantages < 0)
    clipped_high = (ratio.detach() > high) & (advantages > 0)
    return loss, {
        "clip_ratio/low_mean": clipped_low.to(ratio.dtype),
        "clip_ratio/high_mean": clipped_high.to(ratio.dtype),
    }


def _required(logprobs: Tensor | None, loss: str, option: str, *, model: str) -> Tensor:
    """Return `logprobs`. Raises ConfigError if None: the run has no such model."""
    if logprobs is None:
        raise ConfigError(
            f"loss.name {loss} with loss.{option} above 0 needs the logprobs of a {model} model, "
            f"but this run has none; set loss.{option} to 0"
        )
    return logprobs


def check_loss_options(
    name: str, options: Mapping[str, Any], *, defaults: Mapping[str, Any]
) -> None:
    """Raise ConfigError for bounds in the wrong order and for options without effect.

    `options` are those that the config sets, including `entropy_coef`, which is no keyword of the
    loss function. `defaults` are the default values of the function's keywords.
    """
    values = {**defaults, **options}
    for mask in ("token_mask", "geo_mask", "sequence_mask"):
        low, high = f"{mask}_low", f"{mask}_high"
        if low in values and high in values and not values[low] < values[high]:
            raise ConfigError(
                f"loss.{low} {values[low]} is not below loss.{high} {values[high]}; "
                f"no token would remain; lower loss.{low}"
            )
    if options.get("sequence_clip_high") is not None and options.get("ratio_type") != "sequence":
        raise ConfigError(
            "loss.sequence_clip_high needs loss.ratio_type sequence; set loss.ratio_type or remove "
            "loss.sequence_clip_high"
        )
    if options.get("behav_imp_weight_cap") and not options.get("use_decoupled_loss", True):
        raise ConfigError(
            "loss.behav_imp_weight_cap has no effect with loss.use_decoupled_loss false, which "
            "makes every weight 1; remove one of these two settings"
        )
    weights = [options.get(option) for option in ("teacher_tau", "kl_tau", "entropy_coef")]
    if name == "importance" and options.get("adv_tau") == 0 and not any(weights):
        raise ConfigError(
            "loss.adv_tau, loss.teacher_tau, loss.kl_tau and loss.entropy_coef are all 0, so the "
            "gradient would be 0; set one of them"
        )
