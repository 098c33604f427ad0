"""The policy being trained: fp32 masters, optimizer, schedule; groups in, metrics out.

Knows parameters by name and a function that scores tokens; knows nothing of models or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from peralta_zmq.learning import optimizer as adamw
from peralta_zmq.learning.batch import AdvantageFunction, Temperature, make_batches
from peralta_zmq.learning.statistics import describe
from peralta_zmq.learning.step import Score, TokenLoss, take_step
from peralta_zmq.rollout import RolloutGroup


class Learner:
    """`learn` takes one optimizer step; `step` counts them."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        score: Score,
        loss: TokenLoss,
        advantage: AdvantageFunction,
        learning_rate: Callable[[int], float],
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        max_tokens_per_microbatch: int,
        temperature: Temperature = 1.0,
    ) -> None:
        self.step = 0
        self._parameters = parameters
        self._score, self._loss, self._advantage = score, loss, advantage
        self.learning_rate = learning_rate
        self._temperature = temperature
        self._max_grad_norm, self._max_tokens = max_grad_norm, max_tokens_per_microbatch
        self._optimizer = adamw.make_optimizer(parameters, betas=betas, weight_decay=weight_decay)

    def learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take step `self.step + 1` on these groups; returns the step's metrics."""
        self.step += 1
        started = time.monotonic()
        rate = self.learning_rate(self.step)
        adamw.set_learning_rate(self._optimizer, rate)
        device = next(iter(self._parameters.values())).device
        batches = make_batches(
            groups, self._advantage,
            max_tokens=self._max_tokens, temperature=self._temperature, device=device,
        )  # fmt: skip
        taken = take_step(
            self._optimizer, batches,
            score=self._score, loss=self._loss, max_grad_norm=self._max_grad_norm,
        )  # fmt: skip
        return {
            **describe(groups, step=self.step),
            **taken,
            "learning_rate": rate,
            "time/forward_backward": time.monotonic() - started,
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Masters, optimizer state and RNG by path: model/NAME, adamw/KIND/NAME, rng/torch."""
        tensors = {f"model/{name}": p.detach() for name, p in self._parameters.items()}
        for name, kinds in adamw.state_of(self._optimizer, self._parameters).items():
            tensors |= {f"adamw/{kind}/{name}": tensor for kind, tensor in kinds.items()}
        return tensors | {"rng/torch": torch.get_rng_state()}

    def restore(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` gave at `step`.

        Raises ValueError, with nothing changed, for the state of another model.
        """
        masters = {path[6:]: each for path, each in tensors.items() if path.startswith("model/")}
        if masters.keys() != self._parameters.keys():
            strange = min(masters.keys() ^ self._parameters.keys())
            raise ValueError(f"{strange} is in one of the two only")
        for name, parameter in self._parameters.items():
            if masters[name].shape != parameter.shape:
                shapes = f"{list(masters[name].shape)}, not {list(parameter.shape)}"
                raise ValueError(f"{name} has shape {shapes}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(masters[name])
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for path, tensor in tensors.items():
            if path.startswith("adamw/"):
                _, kind, name = path.split("/", 2)
                kinds.setdefault(name, {})[kind] = tensor
        adamw.set_state(self._optimizer, self._parameters, kinds)
        torch.set_rng_state(tensors["rng/torch"])
        self.step = step
