"""AdamW over fp32 masters, with its state as named tensors. Knows parameters by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW; the learning rate is set before each step."""
    return torch.optim.AdamW(
        list(parameters.values()), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Optimizer state by parameter name; empty before the first step."""
    state = optimizer.state
    return {name: dict(state[p]) for name, p in parameters.items() if p in state}


def set_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Restore what `state_of` gave."""
    for name, kinds in state.items():
        optimizer.state[parameters[name]] = dict(kinds)
