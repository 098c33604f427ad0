"""Rotary embeddings that change with the length of the sequence: dynamic NTK and longrope.

Beyond a number of tokens, all positions of a sequence have other frequencies. In transformers the
longest sequence of a forward pass chooses those of all its rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

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


def split_rotary(model: torch.nn.Module) -> None:
    """Let the length of each row choose its rotary embedding."""
    for module in cast(Any, model.modules()):
        has_embedding = isinstance(getattr(module, "rope_type", None), str | dict)
        if has_embedding and length_limit(module.config) is not None:
            module.forward = partial(_forward_by_row, module)


def _forward_by_row(
    module: Any, hidden: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    rows = list[tuple[Tensor, Tensor]]()
    for positions in position_ids:
        _forget_longer_sequences(module)
        rows.append(type(module).forward(module, hidden, positions[None], *args, **options))
    return tuple(torch.cat(each) for each in zip(*rows, strict=True))


def _forget_longer_sequences(module: Any) -> None:
    """Restore the original frequencies, which dynamic NTK does not always do."""
    for name, frequencies in list(module.named_buffers()):
        if name.endswith("original_inv_freq"):
            current = name.replace("original_", "")
            module.register_buffer(current, frequencies.clone(), persistent=False)
    for name in vars(module):
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
