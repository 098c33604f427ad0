"""Test data: a random model, groups with given rewards, a tiny learner."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from peralta_zmq.rollout import Rollout, RolloutGroup

VOCAB_SIZE = 64
RUN = "demo-0011aabb"
INCARNATION = b"bootboot"
TINY = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Qwen3-0.6B
QWEN = {**TINY, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "max_position_embeddings": 40960}  # fmt: skip


def tiny_model(*, seed: int = 0, **settings: Any) -> Any:
    """A random fp32 Qwen3 of a few thousand parameters; `settings` override TINY.

    Returns a copy of a cached model: building one takes much longer.
    """
    import torch

    torch.manual_seed(seed)
    return copy.deepcopy(_built(json.dumps({**TINY, **settings}, sort_keys=True), seed))


@functools.cache
def _built(settings: str, seed: int) -> Any:
    from tools.base_model import new_model

    return new_model(json.loads(settings), seed=seed).eval()


def token_logprobs(model: Any, token_ids: Any, *, temperature: Any = 1.0) -> Any:
    """Logprob of token t given the tokens before it, [B, T], 0 for t = 0.

    `temperature` is a number, or a tensor with one per token [B, T].
    """
    from torch.nn.functional import pad

    if not isinstance(temperature, float):
        temperature = temperature[:, 1:, None]
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None])
    return pad(logprobs.squeeze(-1), (1, 0))


def rollout_with(
    reward: float,
    *,
    num_prompt: int = 3,
    num_generated: int = 4,
    seed: int = 0,
    policy_step: int = 0,
    **fields: Any,
) -> Rollout:
    """A rollout of random tokens with sampling logprobs near log(1/20)."""
    random = np.random.default_rng(seed)
    total = num_prompt + num_generated
    mask = np.arange(total) >= num_prompt
    logprobs = np.where(mask, -np.log(random.uniform(15, 25, total)), 0).astype(np.float32)
    return Rollout(
        token_ids=random.integers(3, VOCAB_SIZE, total).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        policy_steps=np.where(mask, policy_step, -1).astype(np.int32),
        reward=reward,
        finish_reason=fields.pop("finish_reason", "stop"),
        **fields,
    )


def group_of(
    rewards: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,  # generated tokens
    num_prompt: int = 3,
    seed: int = 0,
    policy_step: int = 0,
    **fields: Any,
) -> RolloutGroup:
    """A group of rollouts with the given rewards; `fields` override fields of the group."""
    lengths = lengths or [4] * len(rewards)
    rollouts = tuple(
        rollout_with(
            reward,
            num_prompt=num_prompt,
            num_generated=length,
            seed=seed * 100 + index,
            policy_step=policy_step,
        )
        for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    )
    defaults = {
        "run_id": RUN, "generator_id": "ann", "incarnation": INCARNATION, "group_number": 0,
        "problem_id": "math_1k/7", "task": "calculator", "policy_step": policy_step,
        "weights_id": "0123456789abcdef",
    }  # fmt: skip
    return RolloutGroup(**{**defaults, **fields}, rollouts=rollouts)


def siblings(rewards: Sequence[float], **options: Any) -> RolloutGroup:
    """`group_of` with the same prompt in all rollouts, as generators send it."""
    group = group_of(rewards, **options)
    prompt = group.rollouts[0].token_ids[: options.get("num_prompt", 3)]
    rollouts = tuple(
        replace(rollout, token_ids=np.concatenate([prompt, rollout.token_ids[len(prompt) :]]))
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def packed(groups: Sequence[RolloutGroup], advantage: Any = None, **packing: Any) -> Any:
    """The samples of `pack_groups` and its metrics; the default advantage is group_mean."""
    from peralta_zmq.learning.advantages import advantages_of, group_mean
    from peralta_zmq.learning.packing import Packing, pack_groups

    return pack_groups(groups, advantages_of(groups, advantage or group_mean), Packing(**packing))


def tiny_learner(model: Any, **options: Any) -> Any:
    """A learner of `model` with REINFORCE; `options` override its settings."""
    from peralta_zmq.learning.advantages import group_mean
    from peralta_zmq.learning.learner import Learner, LearnerSettings
    from peralta_zmq.learning.losses import preset
    from peralta_zmq.learning.optimizer import UpdateSettings
    from peralta_zmq.learning.packing import Packing
    from peralta_zmq.models.scorer import Scorer

    rate = options.pop("learning_rate", constant(1e-2))
    decay = options.pop("weight_decay", 0.01)
    max_norm = options.pop("max_grad_norm", 1.0)
    packing_names = {field.name for field in fields(Packing)}
    packing = {name: options.pop(name) for name in packing_names & options.keys()}
    settings: dict[str, Any] = {
        "update": lambda step: UpdateSettings(rate(step), decay, max_norm),
        "compute_logprobs": Scorer(model),
        "loss": preset("reinforce"),
        "advantage": group_mean,
        "packing": Packing(**{"max_tokens": 1000, **packing}),
        **options,
    }
    return Learner(dict(model.named_parameters()), LearnerSettings(**settings))


def step_gradient(model: Any, batches: Sequence[Any], loss: Any, **options: Any) -> tuple[Any, Any]:
    """The whole gradient of an update, flat, and its result; the weights do not change.

    The gradient is None if the update takes no optimizer step.
    """
    import torch

    from peralta_zmq.learning.distributed import full_tensor
    from peralta_zmq.learning.update import update_parameters
    from peralta_zmq.models.scorer import Scorer

    class Recorder(torch.optim.SGD):
        gradient: Any = None

        def step(self, closure: Any = None) -> Any:
            gradients = [each.grad for each in self.param_groups[0]["params"]]
            self.gradient = torch.cat([full_tensor(each).flatten() for each in gradients])

    recorder = Recorder(model.parameters(), lr=1.0)
    options = {"compute_logprobs": Scorer(model), "max_grad_norm": math.inf, **options}
    result = update_parameters(recorder, batches, loss=loss, **options)
    return recorder.gradient, result


def constant(rate: float) -> Callable[[int], float]:
    """A constant schedule."""
    return lambda step: rate


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
