"""Time and memory of a training step, compared with the original's step on the same groups.

The model has the shape of Qwen3-0.6B and random weights. Groups have 4 completions of 12, 18, 26
and 40 random tokens after a prompt of 110. The original pads every rollout, computes in fp32 with
gradient checkpointing and logits at every position, and computes logprobs like TRL's
selective_log_softmax. Ours computes a prompt once. On a CPU that multiplies float32 faster than
bf16, where the trainer chooses float32, steps of 4 groups and memory are measured in float32.
`--quick` uses a shape a tenth as large.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import REPO, Claim, bounded, compared, interleaved, progress, seconds
from benchmarks.limits import flops
from peralta_zmq import models
from peralta_zmq.learning.advantages import advantages_of, group_mean
from peralta_zmq.learning.losses import preset
from peralta_zmq.learning.optimizer import make_optimizer
from peralta_zmq.learning.packing import PackedSample, Packing, make_micro_batches, pack_groups
from peralta_zmq.learning.update import update_parameters
from peralta_zmq.models.scorer import Scorer, set_checkpointing
from peralta_zmq.rollout import Rollout, RolloutGroup
from tools.base_model import new_model

NUM_PROMPT, LENGTHS, NUM_GROUPS = 110, (12, 18, 26, 40), 4
SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
QUICK_SHAPE = {**SHAPE, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536,
               "vocab_size": 32000}  # fmt: skip
RATE = 2e-6
PACKING = Packing(max_tokens=1 << 16)
CPU = torch.device("cpu")
REQUIRED = {
    "exact_fp32_vs_original": 3.5, "bf16_vs_original": 6.0, "bf16_4_groups_vs_original": 9.0,
    "exact_fp32_4_groups_vs_original": 9.0, "flop_share_bf16": 0.4, "flop_share_fp32": 0.4,
    "peak_memory_vs_original": 1.0,
}  # fmt: skip


def run(*, quick: bool, device: torch.device = CPU) -> Iterator[Claim]:
    models.use_threads()
    models.keep_memory()
    shape = QUICK_SHAPE if quick else SHAPE
    variant = chosen_variant(shape, device)
    dtype_name = {"narrow": "bf16", "exact": "exact_fp32"}[variant]
    yield peak_memory(shape, variant, device)
    times = interleaved(variants(shape, variant, device), repeats=2 if quick else 3)
    original = times["original"]
    yield per_group("exact_fp32_vs_original", times["exact"], original)
    yield per_group("bf16_vs_original", times["narrow"], original)
    yield per_group(f"{dtype_name}_4_groups_vs_original", times["4_groups"], original)
    yield flop_share(Setting(shape, device=device), variant, repeats=2 if quick else 3)


def chosen_variant(shape: dict[str, Any], device: torch.device = CPU) -> str:
    """The method of `Setting` that computes in the dtype that the trainer chooses."""
    dtype, _ = models.training_dtype_of(device, shape["hidden_size"])
    return "narrow" if dtype == torch.bfloat16 else "exact"


class Setting:
    """A model and an optimizer that all variants train, so that they hold the same state."""

    def __init__(
        self, shape: dict[str, Any], *, num_groups: int = NUM_GROUPS, device: torch.device = CPU
    ) -> None:
        self._device = device
        with device:  # random numbers of a GPU are faster
            self.model = cast(Any, new_model(shape, seed=0).eval())
        parameters = dict(self.model.named_parameters())
        self._optimizer = make_optimizer(parameters, lr=RATE)
        self._groups = [random_group(seed, shape["vocab_size"]) for seed in range(num_groups)]
        self._scorers = {
            dtype: Scorer(self.model, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
        }
        assert all(each.packs for each in self._scorers.values())
        embedding = self.model.get_input_embeddings().weight.numel()
        self._num_body = sum(each.numel() for each in parameters.values()) - embedding
        self._num_head = embedding

    def samples(self, num_groups: int) -> Sequence[PackedSample]:
        groups = self._groups[:num_groups]
        return pack_groups(groups, advantages_of(groups, group_mean), PACKING)[0]

    def exact(self, num_groups: int) -> None:
        self._ours(num_groups, torch.float32)

    def narrow(self, num_groups: int) -> None:
        self._ours(num_groups, torch.bfloat16)

    def _ours(self, num_groups: int, dtype: torch.dtype) -> None:
        batches = make_micro_batches(self.samples(num_groups), PACKING, device=self._device)
        update_parameters(
            self._optimizer, batches,
            compute_logprobs=self._scorers[dtype], loss=preset("reinforce"), max_grad_norm=1.0,
        )  # fmt: skip

    def original(self, num_groups: int, *, at_once: int = NUM_GROUPS) -> None:
        """The original's step, in padded micro-batches of `at_once` groups."""
        groups = self._groups[:num_groups]
        self.model.train()
        set_checkpointing(self.model, enabled=True)
        try:
            for first in range(0, num_groups, at_once):
                self._backward_as_original(groups[first : first + at_once])
        finally:
            set_checkpointing(self.model, enabled=False)
            self.model.eval()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward_as_original(self, groups: Sequence[RolloutGroup]) -> None:
        rollouts = [each for group in groups for each in group.rollouts]
        token_ids, attention, mask, advantages = (
            each.to(self._device) for each in padded(rollouts)
        )
        logits = self.model(input_ids=token_ids, attention_mask=attention).logits[:, :-1]
        logprobs = selective_log_softmax(logits / 1.0, token_ids[:, 1:])
        counted = mask[:, 1:]
        loss = -(advantages[:, None] * logprobs * counted).sum() / counted.sum()
        loss.backward()

    def needed_flops(self, num_groups: int) -> float:
        """FLOPs of the matrix products of both passes on distinct tokens, without attention."""
        tokens = sum(len(sample.token_ids) for sample in self.samples(num_groups))
        generated = num_groups * sum(LENGTHS)
        return 6.0 * (tokens * self._num_body + generated * self._num_head)


def random_group(
    seed: int,
    vocab_size: int,
    lengths: Sequence[int] = LENGTHS,
    *,
    num_prompt: int = NUM_PROMPT,
    run_id: str = "bench",
) -> RolloutGroup:
    """A group of completions of these lengths after one prompt; all tokens are random."""
    random = np.random.default_rng(seed)
    prompt = random.integers(3, vocab_size, num_prompt)
    rollouts = list[Rollout]()
    for number, length in enumerate(lengths):
        mask = np.arange(num_prompt + length) >= num_prompt
        rollouts.append(
            Rollout(
                token_ids=np.concatenate([prompt, random.integers(3, vocab_size, length)]).astype(
                    np.int32
                ),
                loss_mask=mask,
                logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
                policy_steps=np.where(mask, 0, -1).astype(np.int32),
                reward=float(number % 2),
                finish_reason="stop",
            )
        )
    return RolloutGroup(run_id, "ann", bytes(8), seed, "", "", 0, "", tuple(rollouts))


def padded(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, attention mask and loss mask [B, T], and advantages [B]."""
    longest = max(len(each.token_ids) for each in rollouts)
    token_ids, attention, mask = (torch.zeros(len(rollouts), longest) for _ in range(3))
    for row, rollout in enumerate(rollouts):
        length = len(rollout.token_ids)
        token_ids[row, :length] = torch.from_numpy(rollout.token_ids)
        attention[row, :length] = 1
        mask[row, :length] = torch.from_numpy(rollout.loss_mask)
    advantages = [rollout.reward - 0.5 for rollout in rollouts]
    return token_ids.long(), attention.long(), mask, torch.tensor(advantages)


def selective_log_softmax(logits: Tensor, token_ids: Tensor) -> Tensor:
    """TRL's fp32 version: gather, and logsumexp row by row to save memory."""
    selected = logits.gather(-1, token_ids[..., None]).squeeze(-1)
    return selected - torch.stack([row.logsumexp(-1) for row in logits])


def variants(
    shape: dict[str, Any], variant: str, device: torch.device
) -> dict[str, Callable[[], float]]:
    """Seconds per group of each variant, in the second of two steps of a new process.

    `variant` is the one of 4 groups.
    """

    def second(name: str, num_groups: int = 1) -> float:
        return measure_in_process(shape, name, num_groups, device)[1] / num_groups

    return {
        "original": partial(second, "original"),
        "exact": partial(second, "exact"),
        "narrow": partial(second, "narrow"),
        "4_groups": partial(second, variant, NUM_GROUPS),
    }


def per_group(name: str, ours: Sequence[float], peer: Sequence[float]) -> Claim:
    """Claim in seconds per group; the ratio is the median over rounds."""
    return compared(name, ours, peer, "seconds/group", less_is_better=True)


def flop_share(setting: Setting, variant: str, *, repeats: int) -> Claim:
    """A step of 4 groups against the device's matrix product in the same dtype at the same time."""
    needed, step = setting.needed_flops(NUM_GROUPS), partial(getattr(setting, variant), NUM_GROUPS)
    dtype, name = (torch.bfloat16, "bf16") if variant == "narrow" else (torch.float32, "fp32")
    rates, bounds = list[float](), list[float]()
    step()  # warm-up
    for _ in range(repeats):
        bounds.append(flops(dtype, setting.model.device))
        rates.append(needed / seconds(step))
        progress(f"flop_share: {rates[-1] / 1e9:.4g} of {bounds[-1] / 1e9:.4g} GFLOP/s")
    return bounded(f"flop_share_{name}", rates, bounds, "FLOP/s")


def peak_memory(shape: dict[str, Any], variant: str, device: torch.device) -> Claim:
    """Peak device memory during two steps of `variant` and the original, in separate processes.

    Includes weights, gradients and optimizer state.
    """
    (ours, _), (peer, _) = (
        measure_in_process(shape, each, 1, device) for each in (variant, "original")
    )
    progress(f"peak memory: {ours / 2**30:.2f} GiB, original {peer / 2**30:.2f} GiB")
    return Claim(
        "peak_memory_vs_original", float(ours), "bytes", peer=float(peer), ratio=peer / ours
    )


def measure_in_process(
    shape: dict[str, Any], variant: str, num_groups: int, device: torch.device
) -> tuple[int, float]:
    """Peak bytes and the seconds of the second step, in a new process.

    On a GPU in this one, because its allocator counts from zero when asked to. Only ours keeps
    freed memory in the process, as in a run.
    """
    if device.type != "cpu":
        return two_steps(shape, variant, num_groups, device)
    arguments = json.dumps([shape, variant, num_groups])
    command = [sys.executable, "-m", "benchmarks.training", arguments]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=REPO)
    peak, duration = json.loads(process.stdout)
    return peak, duration


def measure(shape: dict[str, Any], variant: str, num_groups: int) -> None:
    """Print the peak bytes of this process and the seconds of the second of two steps."""
    models.use_threads()
    if variant != "original":
        models.keep_memory()
    sys.stdout.write(json.dumps(two_steps(shape, variant, num_groups, CPU)))


def two_steps(
    shape: dict[str, Any], variant: str, num_groups: int, device: torch.device
) -> tuple[int, float]:
    """Peak bytes, and the seconds of the second of two steps, which has optimizer state."""
    before = reset_peak(device)
    setting = Setting(shape, device=device)
    step = partial(getattr(setting, variant), num_groups)
    step()
    duration = seconds(step)
    return peak_bytes(device) - before, duration


def reset_peak(device: torch.device) -> int:
    """Make a GPU's peak its allocated bytes, and return them; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device = CPU) -> int:
    """Peak bytes of tensors on a GPU, else peak resident bytes of this process.

    Linux includes the parent's in ru_maxrss.
    """
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = status.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    measure(*json.loads(sys.argv[1]))
