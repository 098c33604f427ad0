"""AdamW over fp32 parameters, its state by name, and the learning-rate schedule.

The setting `optim` chooses how AdamW's two moments are stored: in fp32 (`adamw`), in bfloat16
(`adamw_bf16`), or in blocks of 8-bit codes (`adamw_8bit`, from bitsandbytes, arXiv 2110.02861).
Each update is computed in fp32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_step

from peralta_zmq.errors import import_extra
from peralta_zmq.learning.distributed import Ranks, full_tensor, is_sharded

Optim: TypeAlias = Literal["adamw", "adamw_bf16", "adamw_8bit"]
OPTIMS: tuple[str, ...] = get_args(Optim)
# Decays of the mean of gradients and of their squares; bfloat16 rounds away updates above 0.99.
BETAS = (0.9, 0.95)
MOMENTS = ("exp_avg", "exp_avg_sq")
PART = 1 << 22  # elements updated at a time, a multiple of BLOCK
BLOCK = 256  # elements of a block of 8-bit codes, which has one scale
QUANTILE_MAPS = ("qmap1", "qmap2")  # constant code tables of bitsandbytes; not saved


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Numbers that may differ between the updates of a run, and what computes the update."""

    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    arithmetic: Mapping[str, str] = field(default_factory=dict[str, str])
    """See models/step_arithmetic.py."""


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, max_steps: int) -> float:
    """Learning rate of training step `step` (1 .. max_steps).

    Linear warm-up over `warmup_steps`, then constant, or a linear or cosine decay. The decay would
    reach 0 one step after max_steps, so the last step still trains.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps)
    if kind == "linear":
        return peak * (1 - progress)
    if kind == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    return peak


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    optim: Optim = "adamw",
    lr: float = 0.0,
    weight_decay: float = 0.0,
    part: int = PART,
) -> torch.optim.Optimizer:
    """Create AdamW. Moments in fewer than 32 bits are updated `part` elements at a time.

    Raises ConfigError if bitsandbytes is needed and cannot be imported.
    """
    options: dict[str, Any] = dict(lr=lr, betas=BETAS, eps=1e-8, weight_decay=weight_decay)
    if optim == "adamw_bf16":
        return AdamWBf16(parameters.values(), {**options, "part": part})
    if optim == "adamw_8bit":
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns without CUDA
        library = import_extra("bitsandbytes", extra="optim", needed_by="train.optim adamw_8bit")
        optimizer = library.optim.AdamW8bit(parameters.values(), **options)
        optimizer.update_step = partial(_update_in_parts, part, optimizer, optimizer.update_step)
        return optimizer
    return torch.optim.AdamW(parameters.values(), fused=True, **options)


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with bfloat16 moments: 4 bytes of state per parameter instead of 8.

    A relative change of a moment by less than 1/256 may be rounded away.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters in turn: only some moments at a time are in fp32."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.nn.Parameter, gradient: Tensor, group: Mapping[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        options |= {"beta1": BETAS[0], "beta2": BETAS[1]}
        options |= {"fused": True, "amsgrad": False, "maximize": False}
        for weights, gradients, *moments in _parts(
            group["part"], parameter, gradient, *(state[kind] for kind in MOMENTS)
        ):
            mean, square = (each.float() for each in moments)
            step = [state["step"].clone()]
            adamw_step([weights], [gradients], [mean], [square], [], step, **options)
            for moment, value in zip(moments, (mean, square), strict=True):
                moment.copy_(value)
        state["step"] += 1


def _update_in_parts(
    size: int,
    optimizer: Any,
    update_step: Callable[..., None],
    group: dict[str, Any],
    parameter: torch.nn.Parameter,
    *index: int,
) -> None:
    """Call `update_step` of AdamW8bit; on a CPU in parts, as it needs 20 bytes per element."""
    state = optimizer.state[parameter]
    kinds = ("state1", "state2", "absmax1", "absmax2")
    tensors = (parameter, cast(Tensor, parameter.grad), *(state[kind] for kind in kinds[:2]))
    has_codes = state["state1"].dtype == torch.uint8
    if parameter.device.type != "cpu" or not has_codes or not _is_divisible(size, *tensors):
        return update_step(group, parameter, *index)
    scales = zip(*(state[kind].split(size // BLOCK) for kind in kinds[2:]), strict=True)
    parts = zip(_parts(size, *tensors), scales, strict=True)
    for (weights, gradients, *moments), part_scales in parts:
        part = torch.nn.Parameter(weights)
        part.grad = gradients
        part_state = dict(zip(kinds, (*moments, *part_scales), strict=True))
        optimizer.state[part] = {**state, **part_state}
        update_step(group, part, *index)
        del optimizer.state[part]
    state["step"] += 1


def _is_divisible(size: int, *tensors: Tensor) -> bool:
    """Whether tensors of one shape have more than one part; sharded tensors stay whole."""
    is_flat = not any(is_sharded(each) or not each.is_contiguous() for each in tensors)
    return is_flat and tensors[0].numel() > size


def _parts(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of at most `size` elements of tensors of one shape, or the tensors themselves."""
    if not _is_divisible(size, *tensors):
        return iter([tensors])
    return zip(*(each.detach().view(-1).split(size) for each in tensors), strict=True)


def clip_and_step(optimizer: torch.optim.Optimizer, max_grad_norm: float, ranks: Ranks) -> float:
    """Clip the gradients summed over the ranks, step if their norm is finite, return the norm."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ranks.sum_gradients(parameters)
    grad_norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)))
    if math.isfinite(grad_norm):
        optimizer.step()
    return grad_norm


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Optimizer state as {parameter name: {kind: tensor}}.

    Empty before the first step. Kinds: step count, two moments, scales of 8-bit moments.
    """
    state = optimizer.state
    return {
        name: {
            kind: torch.as_tensor(value)
            for kind, value in state[parameter].items()
            if kind not in QUANTILE_MAPS
        }
        for name, parameter in parameters.items()
        if parameter in state
    }


def set_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Restore the result of `state_of`; its tensors are copied."""
    # Only bitsandbytes has init_state, which creates a parameter's state, with the QUANTILE_MAPS.
    init_state: Any = getattr(optimizer, "init_state", None)
    for index, (name, parameter) in enumerate(parameters.items()):
        values: dict[str, Any] = {kind: each.clone() for kind, each in state.get(name, {}).items()}
        if values and init_state is not None:
            init_state(optimizer.param_groups[0], parameter, 0, index)
            values["step"] = int(values["step"])  # bitsandbytes keeps no tensor here
            values = {**optimizer.state[parameter], **values}
        if values:
            optimizer.state[parameter] = values
