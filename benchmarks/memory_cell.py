"""A trainer's process on a model folder: one cell of the bench `memory`.

Does what `bin/trainer` does without sockets: load the model, publish it, take steps that are each
published in the background during the next step, and perhaps write a checkpoint. Prints JSON with
the seconds of the last step and the bytes of weights, gradients and optimizer state. Imports only
the package peralta_zmq, which may be an older one (PYTHONPATH).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from peralta_zmq import build, models
from peralta_zmq.config import load_config
from peralta_zmq.learning.distributed import SINGLE
from peralta_zmq.models import lora
from peralta_zmq.rollout import Rollout, RolloutGroup
from peralta_zmq.trainer.checkpoint import Checkpoint, write_checkpoint
from peralta_zmq.trainer.policy import Policy, open_policy
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.store import WeightStore

PUBLISH_TIMEOUT = 600.0  # seconds


def measure(
    folder: Path,
    flags: Sequence[str],
    num_prompt: int,
    lengths: Sequence[int],
    num_steps: int,
    with_checkpoint: bool,
) -> dict[str, float]:
    """Take the steps; `flags` are the settings, and `folder` gets all files."""
    config = load_config("bench", flags)
    tokenizer = models.load_tokenizer(models.model_folder(config.model.name))
    policy = open_policy(config, tokenizer, SINGLE)
    store = WeightStore.open(folder / "weights")
    store.claim("bench")
    about = cast("dict[str, str | int]", policy.manifest_fields)
    writer = VersionWriter(store, companions=policy.companions, about=about)
    seconds = list[float]()
    options: dict[str, Any] = {}  # of a newer package
    if hasattr(build, "moves_snapshots"):
        options["moves_snapshots"] = build.moves_snapshots(config, policy.base_folder)
    with closing(WeightPublisher(writer, **options)) as publisher:
        publisher.publish(0, lora.published_weights(policy.model))
        for step in range(1, num_steps + 1):
            group = random_group(step, int(policy.model.config.vocab_size), num_prompt, lengths)
            started = time.perf_counter()
            result = policy.learner.learn([group])
            publisher.publish(step, lora.published_weights(policy.model))
            seconds.append(time.perf_counter() - started)
            assert not result.skip_reason and not result.excluded, result
            assert result.metrics["grad_norm"] > 0
        assert publisher.wait(PUBLISH_TIMEOUT)
        assert all(report.version for report in publisher.take_reports())
    state = policy.learner.state()
    if with_checkpoint:
        write_checkpoint(folder / "checkpoints", Checkpoint(num_steps, state, {}), run_id="bench")
    return {"seconds": seconds[-1], **needed_bytes(policy, state)}


def random_group(
    seed: int, vocab_size: int, num_prompt: int, lengths: Sequence[int]
) -> RolloutGroup:
    """Rollouts of random tokens after one prompt; every second one has reward 1."""
    random = np.random.default_rng(seed)
    prompt = random.integers(3, vocab_size, num_prompt)
    rollouts = list[Rollout]()
    for number, length in enumerate(lengths):
        mask = np.arange(num_prompt + length) >= num_prompt
        token_ids = np.concatenate([prompt, random.integers(3, vocab_size, length)])
        rollouts.append(
            Rollout(
                token_ids=token_ids.astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
                policy_steps=np.where(mask, 0, -1).astype(np.int32),
                reward=float(number % 2),
                finish_reason="stop",
            )
        )
    return RolloutGroup("bench", "ann", bytes(8), seed, "", "", 0, "", tuple(rollouts))


def needed_bytes(policy: Policy, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Bytes of the weights, of the gradients and of the optimizer state."""
    model: Any = policy.model
    tensors = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return {
        "weights": sum(each.nbytes() for each in storages.values()),
        "gradients": sum(each.nbytes for each in lora.trained_parameters(model).values()),
        "optimizer": sum(each.nbytes for path, each in state.items() if path.startswith("adamw")),
    }


if __name__ == "__main__":
    models.use_threads()
    models.keep_memory()
    place, *options = cast("list[Any]", json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(measure(Path(place), *options)) + "\n")
