"""Rotary embeddings that change with the length of the sequence: dynamic NTK and longrope.

Beyond a number of tokens, all positions of a sequence have other frequencies.
"""

from __future__ import annotations

from typing import Any

from peralta_zmq.errors import ConfigError


def check_length(config: Any, max_length: int) -> None:
    """Raise ConfigError if sequences of `max_length` tokens change their embedding.

    A token that was sampled before that has another logprob in the complete sequence.
    """
    limit = length_limit(config)
    if limit is not None and min(max_length, config.max_position_embeddings) > limit:
        raise ConfigError(
            f"engine.max_model_len is {max_length}, but the rotary embedding of model "
            f"{config.name_or_path} changes in sequences of more than {limit} tokens; "
            f"set engine.max_model_len to at most {limit}"
        )


def length_limit(config: Any) -> int | None:
    """The longest sequence with the original rotary embedding; None if it never changes."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    limits = list[int]()
    for settings in (rope, *rope.values()):  # one for all layers, or one for each type
        rope_type = settings.get("rope_type") if isinstance(settings, dict) else None
        if rope_type in ("dynamic", "longrope"):
            limits.append(config.max_position_embeddings)  # dynamic NTK changes beyond it
        if rope_type == "longrope":
            limits.append(settings["original_max_position_embeddings"])
    return min(limits, default=None)
