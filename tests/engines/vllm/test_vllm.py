"""What only the vLLM engine has: its process, the prefix cache, errors of vLLM."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_data import (
    GREEDY,
    PROMPTS,
    assert_exact_logprobs,
    assert_greedy_matches,
    plain_greedy,
    requests,
    sampled,
    save_model,
    scored,
    sharp_model,
    switched_greedy,
    trainer_logprobs,
    with_sampling,
)

from peralta_zmq import models, registry
from peralta_zmq.engines.vllm.process import CoreError, CoreProcess
from peralta_zmq.engines.vllm.refusals import installed_version
from peralta_zmq.errors import ConfigError, EngineProcessError
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Message, Sampling

BLOCK = 32  # tokens of a block of vLLM's cache
pytestmark = [
    pytest.mark.skipif(
        installed_version() is None, reason="vLLM is not installed; run make test-vllm"
    ),
    pytest.mark.timeout(120),
]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def opened(folder: Path, **settings: Any) -> Any:
    values = {
        "device": "cpu", "dtype": "float32", "slots": 4, "max_model_len": 64,
        "vllm_args": {"enforce_eager": True, "block_size": BLOCK}, **settings,
    }  # fmt: skip
    return registry.resolve("engine", "vllm").open(folder, EngineSettings(**values), step=3)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    save_model(sharp_model(), tmp_path)
    with closing(opened(tmp_path, max_model_len=128)) as engine:
        yield engine


def newer() -> WeightUpdate:
    return WeightUpdate(7, models.weights_of(sharp_model(seed=8)))


# The process.


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_failed_process_is_noticed_and_restarted_with_newer_weights(
    fault: str, engine: Any
) -> None:
    engine.submit(with_sampling(GREEDY, requests()[:4]))
    engine.advance()
    failed_at = time.monotonic()
    os.kill(psutil.Process().children()[-1].pid, signal.Signals[fault])
    with pytest.raises(EngineProcessError, match="the process of vLLM"):
        engine.advance()
    assert time.monotonic() - failed_at < 10
    partial = {each.index: each for each in engine.drop(range(4))}
    assert engine.num_free() == 4
    with pytest.raises(EngineProcessError):  # no samples from weights of the start
        sampled(engine, GREEDY)
    assert engine.drop(range(4)) == []
    engine.apply(newer())
    assert engine.step == 7
    assert_greedy_matches(engine, sharp_model(seed=8))
    assert sorted(partial) == [0, 1, 2, 3]
    batch = [replace(request, resumes=partial.get(request.index)) for request in requests()]
    for each in sampled(engine, GREEDY, batch)[: len(partial)]:
        before = partial[each.index]
        assert each.policy_steps.tolist() == [3] + [7] * (len(each.token_ids) - 1)
        assert (
            each.token_ids[0]
            == before.token_ids[0]
            == plain_greedy(sharp_model(), each.prompt_ids.tolist(), 1)[0]
        )


def test_weights_that_were_not_loaded_are_noticed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CoreProcess.call

    def without_reload(self: CoreProcess, name: str, *arguments: Any, **options: Any) -> Any:
        return None if name == "reload" else call(self, name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CoreProcess, "call", without_reload)
        with pytest.raises(EngineProcessError, match=r"other values in .* weights of step 7"):
            engine.apply(newer())
    assert engine.step == 3
    engine.apply(newer())
    assert_greedy_matches(engine, sharp_model(seed=8))


def test_memory_that_is_too_small_halves_the_slots_until_one(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CoreProcess.call
    errors = iter(
        [
            CoreError("OutOfMemoryError", "CUDA out of memory"),
            CoreError("RuntimeError", "Worker failed with error 'CUDA out of memory'"),
            CoreError("OutOfMemoryError", "CUDA out of memory"),
        ]
    )

    def out_of_memory(self: CoreProcess, name: str, *arguments: Any, **options: Any) -> Any:
        if name == "step":
            self.kill()
            raise next(errors)
        return call(self, name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CoreProcess, "call", out_of_memory)
        for slots in (2, 1):
            with pytest.raises(EngineProcessError, match=rf"with {slots} slots; lower engine\.s"):
                sampled(engine, GREEDY)
            engine.drop(range(len(PROMPTS)))
            engine.apply(newer())
        with pytest.raises(ConfigError, match=r"engine\.slots 1: CUDA .* engine\.gpu_memory_uti"):
            sampled(engine, GREEDY)
    engine.apply(newer())
    assert_greedy_matches(engine, sharp_model(seed=8))


# The prefix cache.


def test_new_prompt_does_not_use_the_cache_of_earlier_weights(engine: Any) -> None:
    """The prompts share three blocks of the cache, and one completion is running at the change."""
    prefix, calls = [5 + index % 50 for index in range(3 * BLOCK)], list[int]()

    prompts = [[*prefix, 9], [*prefix, 9], [*prefix, 7]]

    def between_steps() -> None:
        calls.append(1)
        if len(calls) == 4:
            engine.apply(newer())

    first, *later = sampled(
        engine, GREEDY, requests(prompts), between_steps=between_steps,
        may_submit=lambda: engine.num_free() == 4 or len(calls) >= 6,
    )  # fmt: skip
    assert first.policy_steps.tolist() == [3] * 4 + [7] * 8
    expected, _ = switched_greedy(first, [0] * 4 + [8] * 8)
    assert first.token_ids.tolist() == expected
    assert {step for each in later for step in each.policy_steps.tolist()} == {7}
    assert_exact_logprobs(later, trainer_logprobs(sharp_model(seed=8), later))


# Settings.


def test_bfloat16_model_has_logits_and_logprobs_in_float32(tokenizer: Any) -> None:
    """Logprobs are closer to those of the trainer than with logits in bfloat16."""
    cpu, errors = torch.device("cpu"), list[float]()
    model = models.load_model(models.EMBEDDED, device=cpu, dtype=torch.float32)
    texts = [f"add {n} to the product of {n + 1} and 3." for n in range(2, 8)]
    prompts = [models.chat_prompt(tokenizer, [Message("user", text)]) for text in texts]
    for overrides in ({}, {"head_dtype": "model"}):
        arguments = {"enforce_eager": True, "hf_overrides": overrides}
        engine = opened(models.EMBEDDED, dtype="bfloat16", vllm_args=arguments)
        sampling = Sampling(max_completion_length=12)
        with closing(engine):
            completions = sampled(engine, sampling, requests(prompts, siblings=4))
        differences = [each.logprobs - scored(model, each, 1.0) for each in completions]
        errors.append(float(np.abs(np.concatenate(differences)).mean()))
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, {}, r"cannot serve the model .*; set engine\.name to"),
        ({}, {"vllm_args": {"no_such": 1}}, r"engine\.vllm_args: .*no_such.*EngineArgs"),
        ({}, {"slots": 900_000_000}, r"engine\.slots 900000000 .* GiB .* use engine\.slots \d"),
        ({"auto_map": {"AutoConfig": "code.Mine"}, "model_type": "mine"}, {},
         r"model\.trust_remote_code"),
    ],
)  # fmt: skip
def test_model_or_settings_that_vllm_cannot_use_are_refused(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(sharp_model(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        opened(tmp_path, **settings)
    assert "\n" not in str(caught.value)
