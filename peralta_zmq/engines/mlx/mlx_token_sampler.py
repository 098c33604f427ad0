"""Sampling on MLX: from logits to one token per row and its logprob.

Options work as in transformers (see native/token_sampler.py). Letters in shapes: n rows, V
vocabulary, k tokens that top_k keeps.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]

from peralta_zmq.rollout import Sampling


def sample(
    logits: Any,  # [n, V]
    sampling: Sampling,
    uniform: Any,  # [n], uniform in [0, 1)
    *,
    seen: Any = None,  # [n, V] bool, True: the repetition penalty applies
    banned: Any = None,  # [n, V] bool, True: must not be sampled
) -> tuple[Any, Any]:
    """Sample one token for each of n rows; returns tokens [n] and logprobs [n] in float32."""
    logits = logits.astype(mx.float32)
    scaled = logits / (sampling.temperature or 1.0)
    adjusted = logits
    if seen is not None:
        penalty = sampling.repetition_penalty
        adjusted = mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)
    if banned is not None:
        adjusted = mx.where(banned, -mx.inf, adjusted)
    if sampling.temperature == 0:
        tokens = mx.argmax(adjusted, axis=-1)
    else:
        tokens = _sample_tokens(adjusted, sampling, uniform[:, None])
    chosen = mx.take_along_axis(scaled, tokens[:, None], axis=-1)
    return tokens, (chosen - mx.logsumexp(scaled, axis=-1, keepdims=True))[:, 0]


def _sample_tokens(logits: Any, sampling: Sampling, uniform: Any) -> Any:
    token_ids = None  # [n, k], most probable first; None = the whole vocabulary, in its order
    if sampling.top_k or sampling.top_p < 1:
        token_ids = mx.argsort(-logits, axis=-1)[:, : sampling.top_k or None]
        logits = mx.take_along_axis(logits, token_ids, axis=-1)
    probs = mx.softmax(logits / sampling.temperature, axis=-1)
    if sampling.top_p < 1:  # keeps the token at which the sum of probs crosses top_p
        probs = mx.where(mx.cumsum(probs, axis=-1) - probs >= sampling.top_p, 0, probs)
    if sampling.min_p > 0:
        probs = mx.where(probs < sampling.min_p * probs.max(-1, keepdims=True), 0, probs)
    # Inverse transform sampling. Sums of a parallel scan may decrease by rounding, so a token also
    # needs a probability of its own.
    cumulated = mx.cumsum(probs, axis=-1)
    is_above = (cumulated > uniform * cumulated[:, -1:]) & (probs > 0)
    index = mx.argmax(mx.where(is_above.any(-1, keepdims=True), is_above, probs), axis=-1)
    return index if token_ids is None else mx.take_along_axis(token_ids, index[:, None], -1)[:, 0]
