"""Our losses and TRL's released code on the same random batches, in float64: `make test-trl`.

TRL's `_compute_loss` runs unchanged on an object that has the attributes of its trainer. It gets
the logprobs and the entropy of the policy as tensors, instead of computing them with a model. The
batch is one micro-batch, and the advantages are given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peralta_zmq.config.objective_sections import LossSection
from peralta_zmq.learning.losses import Tokens, make_loss, with_entropy_bonus
from peralta_zmq.learning.selection import entropy_bound

pytestmark = pytest.mark.trl

NUM_BATCHES = 500
NUM_ROLLOUTS, MAX_LENGTH = 5, 12  # tokens; the longest of a batch is often shorter
TOLERANCE = 1e-9  # relative; measured below 1e-12


@dataclass(frozen=True, slots=True)
class Batch:
    """Random numbers for B rollouts of up to T tokens; [B, T], the advantages [B]."""

    policy: Tensor
    prox: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor


def batch_of(seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, MAX_LENGTH + 1, (NUM_ROLLOUTS,), generator=random)
    shape = NUM_ROLLOUTS, int(lengths.max())

    def drawn(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=random, dtype=torch.float64)

    policy = -2 * torch.rand(shape, generator=random, dtype=torch.float64)
    prox = policy + drawn(0.3)
    return Batch(
        policy=policy,
        prox=prox,
        old=prox + drawn(0.3),
        reference=policy + drawn(0.5),
        entropy=drawn(1.0).abs().float().double(),  # TRL's quantile is one of float32 numbers
        mask=(torch.arange(shape[1]) < lengths[:, None]).long(),
        advantages=torch.randn(NUM_ROLLOUTS, generator=random, dtype=torch.float64),
    )


# TRL's names and options of our losses, where they differ.
TRL_OPTIONS: dict[str, dict[str, Any]] = {
    "cispo": {"epsilon_high": 5.0},  # our default is the paper's value
    "luspo": {"importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("grpo", "bnpo", "dapo", "dr_grpo")),
    *((name, {}) for name in ("cispo", "sapo", "luspo", "vespo")),
    ("cispo", {"epsilon_high": 1.1}),
    ("gspo", {"epsilon": 0.05, "epsilon_high": 0.08}),
    ("dapo", {"epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.5}),
    ("grpo", {"epsilon_high": 0.28, "delta": 1.1}),  # below 1 + epsilon_high
    ("dapo", {"importance_sampling_level": "sequence"}),  # AReaL's GSPO
    ("sapo", {"importance_sampling_level": "sequence"}),
    ("grpo", {"off_policy_mask_threshold": 0.1}),
    *((name, {"beta": 0.3}) for name in ("grpo", "dapo", "dr_grpo", "cispo", "luspo")),
    ("gspo", {"beta": 0.3, "epsilon": 0.1, "epsilon_high": 0.2}),
    *((name, {"top_entropy_quantile": 0.25}) for name in ("grpo", "dr_grpo", "cispo", "luspo")),
    ("dapo", {"top_entropy_quantile": 0.5, "beta": 0.3}),
    *((name, {"entropy_coef": 0.07}) for name in ("dapo", "bnpo")),
    *(
        (name, {"importance_sampling_mode": mode, "importance_sampling_clip_max": 1.3})
        for name in ("dapo", "grpo", "cispo", "sapo")
        for mode in MODES
    ),
    *(
        ("vespo", {"importance_sampling_mode": mode, "importance_sampling_clip_max": 1.3})
        for mode in MODES[:2]
    ),
]  # fmt: skip


def case_name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "options"), CASES, ids=case_name)
def test_loss_and_gradient_equal_those_of_trl(
    name: str, options: dict[str, Any], tmp_path: Any
) -> None:
    theirs = Trl({"loss_type": name, **TRL_OPTIONS.get(name, {}), **options}, folder=str(tmp_path))
    is_corrected = "importance_sampling_mode" in options
    num_different = 0
    for seed in range(NUM_BATCHES):
        batch = batch_of(seed)
        value, gradient = loss_of(batch, name, options, is_corrected=is_corrected)
        their_value, their_gradient = theirs.loss_of(batch, is_corrected=is_corrected)
        assert value == pytest.approx(their_value, rel=TOLERANCE, abs=1e-12)
        assert (gradient - their_gradient).norm() <= TOLERANCE * their_gradient.norm()
        num_different += bool(their_gradient.norm() > 0)
    assert num_different > NUM_BATCHES / 2  # sequence_mask leaves out all rollouts of some


def loss_of(
    batch: Batch, name: str, options: dict[str, Any], *, is_corrected: bool
) -> tuple[float, Tensor]:
    """Our loss and its gradient with respect to the logprobs, [B, T]."""
    options = dict(options)
    if "importance_sampling_level" in options:
        options["importance_sampling_level"] = "sequence_mean"  # "sequence" in TRL
    section = LossSection(name=name, **options)
    loss = make_loss(section, max_completion_length=MAX_LENGTH)
    loss = with_entropy_bonus(loss, section.entropy_coef)
    chosen = batch.mask.bool()
    entropy = batch.entropy[chosen]
    policy = batch.policy.clone().requires_grad_()
    rollouts = torch.arange(NUM_ROLLOUTS)[:, None].expand_as(batch.mask)[chosen]
    value, _ = loss(
        Tokens(
            logprobs=policy[chosen],
            old_logprobs=(batch.old if is_corrected else batch.prox)[chosen],
            advantages=batch.advantages[rollouts],
            mask=torch.ones(len(rollouts), dtype=torch.float64),
            sequence=rollouts,
            num_sequences=NUM_ROLLOUTS,
            step_tokens=float(len(rollouts)),
            step_sequences=float(NUM_ROLLOUTS),
            prox_logprobs=batch.prox[chosen] if is_corrected else None,
            ref_logprobs=batch.reference[chosen],
            entropy=entropy,
            selected=entropy >= entropy_bound(entropy, options.get("top_entropy_quantile", 1.0)),
        )
    )
    value.backward()
    assert policy.grad is not None
    return value.item(), policy.grad


class Trl:
    """TRL's loss with TRL's options, on an object with the attributes of GRPOTrainer."""

    def __init__(self, options: dict[str, Any], *, folder: str) -> None:
        from accelerate import Accelerator
        from trl import GRPOConfig, GRPOTrainer

        renamed = {
            key.replace("importance_sampling", "vllm_importance_sampling")
            if key.startswith(("importance_sampling_mode", "importance_sampling_clip"))
            else key: value
            for key, value in options.items()
        }
        args = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none",
            max_completion_length=MAX_LENGTH, **renamed,
        )  # fmt: skip
        self._compute_loss = GRPOTrainer._compute_loss
        self.trainer = SimpleNamespace(
            args=args,
            accelerator=Accelerator(cpu=True),
            model=SimpleNamespace(training=True),
            loss_type=args.loss_type,
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            beta=args.beta,
            importance_sampling_level=args.importance_sampling_level,
            off_policy_mask_threshold=args.off_policy_mask_threshold,
            top_entropy_quantile=args.top_entropy_quantile,
            max_completion_length=args.max_completion_length,
            use_vllm="vllm_importance_sampling_mode" in renamed,
            vllm_importance_sampling_correction=args.vllm_importance_sampling_correction,
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            use_adaptive_entropy=False,
            entropy_coef=args.entropy_coef,
            _entropy_bonus_enabled=bool(args.entropy_coef),
            _metrics={"train": defaultdict(list)},
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
        )
        self.trainer.get_high_entropy_mask = partial(
            GRPOTrainer.get_high_entropy_mask, self.trainer
        )
        args.steps_per_generation = 1

    def loss_of(self, batch: Batch, *, is_corrected: bool) -> tuple[float, Tensor]:
        """The loss and its gradient with respect to the logprobs, [B, T]."""
        policy = batch.policy.clone().requires_grad_()
        self.trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
            policy, batch.entropy, None
        )  # fmt: skip
        ids = torch.zeros_like(batch.mask)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": batch.mask,
            "advantages": batch.advantages,
            "old_per_token_logps": batch.prox,
            "ref_per_token_logps": batch.reference,
            "num_items_in_batch": batch.mask.sum(),
        }
        if is_corrected:
            inputs["sampling_per_token_logps"] = batch.old
            inputs["importance_sampling_ratio"] = self._importance_sampling_ratio(batch)
        value = self._compute_loss(self.trainer, None, inputs)
        value.backward()
        assert policy.grad is not None
        return value.item(), policy.grad

    def _importance_sampling_ratio(self, batch: Batch) -> Tensor:
        """The input that TRL computes while it generates, in a method that needs a model."""
        args = self.trainer.args
        level, kind = args.vllm_importance_sampling_mode.split("_")
        log_ratio = (batch.prox - batch.old) * batch.mask
        if level == "sequence":
            log_ratio = log_ratio.sum(-1, keepdim=True)
        ratio = log_ratio.exp()
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        if kind == "truncate":
            return ratio.clamp(min=low, max=high)
        is_outside = (ratio > high) | (ratio < (0.0 if low is None else low))
        return ratio.masked_fill(is_outside, 0.0)
