"""AdamW over fp32 masters, with its state as named tensors. Knows parameters by name.

The state is fp32 (`adamw`), bfloat16 (`adamw_bf16`), or blocks of 8 bits (`adamw_8bit`, which is
bitsandbytes', arXiv 2110.02861); every step is computed in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw as take_adamw_step

from peralta_zmq.errors import ConfigError

Optim: TypeAlias = Literal["adamw", "adamw_bf16", "adamw_8bit"]
OPTIMS: tuple[str, ...] = get_args(Optim)
EPSILON = 1e-8
MEANS = ("exp_avg", "exp_avg_sq")
TABLES = ("qmap1", "qmap2")  # of 8-bit codes; the same for all


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    optim: Optim = "adamw",
) -> torch.optim.Optimizer:
    """AdamW, fused where it can be; the learning rate is set before each step.

    Raises ConfigError when a package is missing.
    """
    chosen: dict[str, Any] = {"lr": 0.0, "betas": betas, "weight_decay": weight_decay}
    if optim == "adamw_bf16":
        return AdamWBf16(parameters.values(), {**chosen, "eps": EPSILON})
    if optim == "adamw_8bit":
        return _bitsandbytes().optim.AdamW8bit(parameters.values(), eps=EPSILON, **chosen)
    return torch.optim.AdamW(parameters.values(), eps=EPSILON, fused=True, **chosen)


class AdamWBf16(torch.optim.Optimizer):
    """AdamW that keeps its two means in bfloat16: 4 bytes of state for a parameter, not 8.

    A mean that moves by less than 1/256 of itself in a step may stand still; hence the bound of
    the betas, which the config checks.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As torch's; only one parameter at a time has its means in fp32."""
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
            for kind in MEANS:
                state[kind] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        mean, square = (state[kind].float() for kind in MEANS)
        take_adamw_step(
            [parameter], [gradient], [mean], [square], [], [state["step"]],
            fused=True, amsgrad=False, maximize=False, beta1=group["betas"][0],
            beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"],
        )  # fmt: skip
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Optimizer state by parameter name; empty before the first step."""
    state = optimizer.state
    return {
        name: {kind: torch.as_tensor(each) for kind, each in state[p].items() if kind not in TABLES}
        for name, p in parameters.items()
        if p in state
    }


def set_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Restore what `state_of` gave."""
    begin: Any = getattr(optimizer, "init_state", None)  # bitsandbytes', with its tables
    for number, (name, parameter) in enumerate(parameters.items()):
        kinds: dict[str, Any] = dict(state.get(name, {}))
        if kinds and begin is not None:
            begin(optimizer.param_groups[0], parameter, 0, number)
            kinds["step"] = int(kinds["step"])
            kinds = {**optimizer.state[parameter], **kinds}
        if kinds:
            optimizer.state[parameter] = kinds


def _bitsandbytes() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # kernels that are none of ours
    try:
        import bitsandbytes  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"train.optim adamw_8bit needs bitsandbytes ({error}): pip install "
            "'peralta_zmq[optim]', or use adamw_bf16"
        ) from None
    return bitsandbytes
