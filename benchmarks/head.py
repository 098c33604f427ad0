"""Time and memory of the output head in chunks of the vocabulary, compared with whole logits.

The head alone has the shape of Qwen3-0.6B's and random weights, in bf16 autocast over fp32 weights.
With 384 tokens the logits are kept for the backward pass, with 2048 most of them are computed
again. A frozen head is that of a model with LoRA. `step_*` are training steps of the bench
`training` on 4 groups, 384 generated tokens: with kept logits, and with all computed again.
`--quick` uses a shape a tenth as large.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks import training
from benchmarks.harness import REPO, Claim, compared, interleaved, progress, seconds
from benchmarks.training import CPU, NUM_GROUPS, QUICK_SHAPE, SHAPE, peak_bytes, reset_peak
from peralta_zmq import models
from peralta_zmq.models import head

NUM_TOKENS, MANY_TOKENS = 384, 2048
REQUIRED = {
    "head_time_vs_whole_384": 0.9, "step_time_vs_whole": 0.9, "step_time_vs_whole_recomputed": 0.9,
    "head_memory_vs_whole_2048": 2.0,
}  # fmt: skip


def run(*, quick: bool, device: torch.device = CPU) -> Iterator[Claim]:
    """Measure and yield the claims."""
    models.use_threads()
    models.keep_memory()
    shape, repeats = (QUICK_SHAPE, 2) if quick else (SHAPE, 3)
    for num_tokens in (NUM_TOKENS, MANY_TOKENS):
        yield memory(shape, num_tokens, device)
        for frozen in (False, True):
            yield time(shape, num_tokens, device, frozen=frozen, repeats=repeats)
    yield from steps(shape, device, repeats=repeats)


class Setting:
    """A head, and the hidden states of random tokens."""

    def __init__(
        self, shape: dict[str, Any], num_tokens: int, device: torch.device, *, frozen: bool = False
    ) -> None:
        random = torch.Generator().manual_seed(0)
        vocab_size, width = shape["vocab_size"], shape["hidden_size"]
        weight = torch.randn(vocab_size, width, generator=random).mul_(0.02).to(device)
        self._weight = weight.requires_grad_(not frozen)
        self._hidden = torch.randn(num_tokens, width, generator=random).to(device)
        self._token_ids = torch.randint(vocab_size, (num_tokens,), generator=random).to(device)

    def chunked(self) -> None:
        """Forward and backward pass in chunks."""
        self._backward(partial(head.head_logprobs, weight=self._weight, token_ids=self._token_ids))

    def whole(self) -> None:
        """Forward and backward pass with whole logits."""

        def logprobs(hidden: Tensor) -> Tensor:
            logits = torch.nn.functional.linear(hidden, self._weight)
            return models.selected_logprobs(logits, self._token_ids)

        self._backward(logprobs)

    def _backward(self, compute: Callable[[Tensor], Tensor]) -> None:
        self._weight.grad = None
        hidden = self._hidden.clone().requires_grad_()
        with torch.autocast(hidden.device.type, torch.bfloat16):
            logprobs = compute(hidden)
        logprobs.sum().backward()


def time(
    shape: dict[str, Any], num_tokens: int, device: torch.device, *, frozen: bool, repeats: int
) -> Claim:
    """Seconds of both passes of the head."""
    setting = Setting(shape, num_tokens, device, frozen=frozen)
    setting.chunked()
    setting.whole()
    times = interleaved(
        {"chunked": partial(seconds, setting.chunked), "whole": partial(seconds, setting.whole)},
        repeats=repeats,
    )
    name = f"{'frozen_' if frozen else ''}head_time_vs_whole_{num_tokens}"
    return compared(name, times["chunked"], times["whole"], "s", less_is_better=True)


def memory(shape: dict[str, Any], num_tokens: int, device: torch.device) -> Claim:
    """Peak bytes of both passes, above those of the weight and its gradient."""
    ours, peer = (
        measure_in_process(shape, num_tokens, device, variant) for variant in ("chunked", "whole")
    )
    name = f"head_memory_vs_whole_{num_tokens}"
    return Claim(name, float(ours), "bytes", peer=float(peer), ratio=peer / ours)


def measure_in_process(
    shape: dict[str, Any], num_tokens: int, device: torch.device, variant: str
) -> int:
    """Peak bytes in a new process, see `memory`; on a GPU in this one."""
    if device.type == "cpu":
        arguments = json.dumps([shape, num_tokens, variant])
        command = [sys.executable, "-m", "benchmarks.head", arguments]
        process = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=REPO)
        peak = int(process.stdout)
    else:
        peak = added_bytes(shape, num_tokens, device, variant)
    progress(f"{variant} with {num_tokens} tokens: {peak / 2**20:.0f} MiB")
    return peak


def added_bytes(shape: dict[str, Any], num_tokens: int, device: torch.device, variant: str) -> int:
    """Peak bytes of both passes above those of weight and gradient."""
    work = getattr(Setting(shape, num_tokens, device), variant)
    before = peak_bytes() if device.type == "cpu" else reset_peak(device)
    work()
    gradient = 4 * shape["vocab_size"] * shape["hidden_size"]
    return peak_bytes(device) - before - gradient


def measure(shape: dict[str, Any], num_tokens: int, variant: str) -> None:
    """Print the bytes of `added_bytes` on a CPU."""
    models.use_threads()
    sys.stdout.write(str(added_bytes(shape, num_tokens, CPU, variant)))


def steps(shape: dict[str, Any], device: torch.device, *, repeats: int) -> Iterator[Claim]:
    """Seconds and peak memory of whole training steps, each in a new process."""
    names = ("narrow", "narrow_recomputed", "narrow_whole")
    peaks: dict[str, list[int]] = {name: [] for name in names}

    def second(name: str) -> float:
        peak, duration = training.measure_in_process(shape, name, NUM_GROUPS, device, keeps=True)
        peaks[name].append(peak)
        return duration

    times = interleaved({name: partial(second, name) for name in names}, repeats=repeats)
    whole = times["narrow_whole"]
    for suffix, name in (("", "narrow"), ("_recomputed", "narrow_recomputed")):
        yield compared(f"step_time_vs_whole{suffix}", times[name], whole, "s", less_is_better=True)
        ours, peer = (statistics.median(peaks[each]) for each in (name, "narrow_whole"))
        yield Claim(
            f"step_memory_vs_whole{suffix}", ours, "bytes", peer=peer, ratio=peer / ours, n=repeats
        )


if __name__ == "__main__":
    measure(*cast("tuple[dict[str, Any], int, str]", json.loads(sys.argv[1])))
