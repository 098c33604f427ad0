"""Models, requests and reference results for the tests of the engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import LARGEST_LOGIT, Float64, exact_result, is_as_exact_as_torch
from sample_data import tiny_model, token_logprobs

from peralta_zmq import models, registry
from peralta_zmq.engines.native.decoder import Decoder
from peralta_zmq.engines.native.native_engine import CachedRows
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS
from peralta_zmq.engines.row_engine import RowEngine, Rows
from peralta_zmq.engines.vllm.refusals import installed_version
from peralta_zmq.registry import Engine, EngineSettings, WeightUpdate
from peralta_zmq.rollout import Completion, Request, SampledToken, Sampling

ENGINES = ("native", "hf", "mlx", "vllm")
DEVICE = os.environ.get("PERALTA_TEST_DEVICE", "cpu")
END = 2
PROMPTS = [
    [5, 9, 33], [5, 9, 7], [5, 40, 41, 42, 43, 44, 45, 46], [5, 9, 33, 8],
    [5, 11], [5, 9, 33, 12], [6, 6, 6, 6, 6], [5, 12], [9], [5, 9, 33, 13],
]  # fmt: skip
GREEDY = Sampling(temperature=0.0, max_completion_length=12)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "temperature": {"temperature": 0.7}, "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5}, "min_tokens": {"min_tokens": 6},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02,
            "repetition_penalty": 1.2, "min_tokens": 3},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "norm_topk_prob": True,
           "experts_implementation": "eager"}  # the only one for float64  # fmt: skip
DELTA_NET = {"linear_conv_kernel_dim": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
             "linear_key_head_dim": 16, "linear_value_head_dim": 16,
             "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {}, "qwen2": {"model_type": "qwen2"},
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 4, "final_logit_softcapping": 30.0,
               "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 4, "query_pre_attn_scalar": 8,
               "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "ministral3": {"model_type": "ministral3", "sliding_window": None, "rope_parameters": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
        "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 4,
              "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "sliding_window": None,
                "use_sliding_window": False},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA_NET},
    "qwen3_next": {"model_type": "qwen3_next", **DELTA_NET, **EXPERTS,
                   "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **DELTA_NET, **EXPERTS,
                    "shared_expert_intermediate_size": 32},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}  # fmt: skip
# mlx-lm and vLLM compute these in their published layout: tests/models/test_other_libraries.py.
NOT_ELSEWHERE = (
    "mistral", "ministral3", "olmo2", "olmo3", "qwen3_moe", "smollm3", "qwen3_5", "qwen3_next",
    "qwen3_5_moe", "lfm2",
)  # fmt: skip


def sharp_model(seed: int = 0, **settings: Any) -> Any:
    """A random model whose context, biases, temperature and truncation make a difference."""
    settings = {
        "head_dim": 32, "tie_word_embeddings": False, "attn_implementation": "eager", **settings,
    }  # fmt: skip
    model = tiny_model(seed=seed, **settings)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=random))
            tensor.mul_(12 if name == "lm_head.weight" else 4 if tensor.ndim == 2 else 1)
    model.generation_config.eos_token_id = END
    return model


def save_model(model: Any, folder: Path) -> None:
    """Write a folder with the weights, the config and a tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.EMBEDDED / name, folder / name)


class Opener:
    """Opens engines of one kind on folders with the weights of torch models."""

    def __init__(self, name: str, folder: Path, patched: pytest.MonkeyPatch) -> None:
        """Skips the test if the engine's library is not installed."""
        if name == "mlx":
            pytest.importorskip("mlx_lm", reason="mlx-lm is not installed; run make test-mlx")
        if name == "vllm":
            if installed_version() is None:
                pytest.skip("vLLM is not installed; run make test-vllm")
            patched.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles a function when it samples
        self.name, self._folder, self._number = name, folder, 0

    def folder(self, model: Any) -> Path:
        """A folder with the weights, config and tokenizer."""
        self._number += 1
        folder = self._folder / str(self._number)
        save_model(model, folder)
        return folder

    def __call__(self, model: Any, *, step: int = 0, **settings: Any) -> Engine:
        return self.open(self.folder(model), step=step, **settings)

    def open(self, folder: Path, *, step: int = 0, **settings: Any) -> Engine:
        sizes: dict[str, Any] = {
            "device": DEVICE, "dtype": "float32", "slots": 4, "max_model_len": 64
        }  # fmt: skip
        if self.name == "vllm":
            sizes["vllm_args"] = {"enforce_eager": True}
        factory = registry.resolve("engine", self.name)
        return factory.open(folder, EngineSettings(**{**sizes, **settings}), step=step)


def engine_on(
    model: Any,
    tokenizer: Any,
    *,
    slots: int = 4,
    max_model_len: int = 64,
    max_kept: int = 0,
    **options: Any,
) -> RowEngine:
    """A native engine whose decoder has the given options."""
    decoder = Decoder(model, num_rows=slots + PROMPT_ROWS, capacity=max_model_len, **options)
    end_ids = models.end_token_ids(model.generation_config, tokenizer)
    rows = Rows(slots, tokenizer, end_ids, max_model_len=max_model_len)
    return RowEngine(CachedRows(decoder, num_rows=slots, max_kept=max_kept), rows)


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, siblings: int = 1) -> list[Request]:
    arrays = [np.array(ids, np.int32) for ids in prompts for _ in range(siblings)]
    return [Request(index, ids) for index, ids in enumerate(arrays)]


def with_sampling(sampling: Sampling, batch: Iterable[Request]) -> list[Request]:
    """The requests with these sampling parameters."""
    return [replace(request, sampling=sampling) for request in batch]


def completed(
    engine: Engine,
    batch: Iterable[Request],
    *,
    between_steps: Callable[[], None] = lambda: None,
    may_submit: Callable[[], bool] = lambda: True,
) -> Iterator[Completion]:
    """Submit requests as long as there is room, and yield the completions as they end.

    `between_steps` is called after each decode step, `may_submit` before each request.
    """
    source, num_left = iter(batch), 0
    request = next(source, None)
    while request is not None or num_left:
        while request is not None and engine.num_free() and may_submit():
            engine.submit([request])
            num_left += 1
            request = next(source, None)
        ended = engine.advance()
        num_left -= len(ended)
        yield from ended
        between_steps()


def sampled(
    engine: Any, sampling: Sampling, batch: Iterable[Request] | None = None, **options: Any
) -> list[Completion]:
    """The completions, all with these sampling parameters, in the order of the requests."""
    batch = requests() if batch is None else batch
    own = (replace(request, sampling=sampling) for request in batch)
    return sorted(completed(engine, own, **options), key=lambda each: each.index)


class TokenCounter:
    """An engine that counts the tokens that another engine samples."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._sampled = engine, list[SampledToken]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def num_tokens(self) -> int:
        return len(self._sampled)

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit([replace(each, sampled=self._sampled) for each in requests])


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def plain_greedy(model: Any, prompt: Sequence[int], length: int, **options: Any) -> list[int]:
    """Greedy tokens of transformers' `generate` with these options."""
    alone = torch.tensor([prompt])
    options = {"eos_token_id": END, "pad_token_id": 0, "max_new_tokens": length, **options}
    return model.generate(
        alone, attention_mask=torch.ones_like(alone), do_sample=False, **options
    )[0, len(prompt) :].tolist()  # fmt: skip


class SwitchedModel:
    """transformers' forward pass, with the weights of another seed for each token."""

    def __init__(self, dtype: torch.dtype, seeds: Iterable[int], **settings: Any) -> None:
        self._models = {seed: sharp_model(seed=seed, **settings).to(dtype) for seed in {*seeds}}
        self._cache: Any = None

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], seed: int) -> torch.Tensor:
        """Logprobs of the next token [V]; keys and values of earlier tokens are kept."""
        output = self._models[seed](
            input_ids=torch.tensor([ids]), past_key_values=self._cache, use_cache=True
        )
        self._cache = output.past_key_values
        return output.logits[0, -1].log_softmax(-1)


def switched_greedy(
    completion: Completion, seeds: Sequence[int], **settings: Any
) -> tuple[list[int], np.ndarray]:
    """The most probable token in place of each of a completion, by transformers.

    For token t, the model has the weights of seed `seeds[t]`. The array has the logprobs of the
    completion's tokens, as in `trainer_logprobs`.
    """
    plain, exact = (
        SwitchedModel(dtype, seeds, **settings) for dtype in (torch.float32, torch.float64)
    )
    greedy, scores, ids = list[int](), list[list[float]](), completion.prompt_ids.tolist()
    for token, seed in zip(completion.token_ids.tolist(), seeds, strict=True):
        logprobs = plain.logprobs(ids, seed)
        with Float64():
            exact_logprobs = exact.logprobs(ids, seed)
        greedy.append(int(logprobs.argmax()))
        scores.append([float(logprobs[token]), float(exact_logprobs[token])])
        ids = [token]
    return greedy, np.array(scores).T


def scored(model: Any, completion: Completion, temperature: torch.Tensor | float) -> list[float]:
    """The trainer's logprobs of the generated tokens."""
    row = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.token_ids])).long()
    with torch.no_grad():
        logprobs = token_logprobs(model, row[None], temperature=temperature)
    return logprobs[0, len(completion.prompt_ids) :].tolist()


def trainer_logprobs(
    model: Any,
    completions: Sequence[Completion],
    temperatures: Sequence[torch.Tensor | float] | float = 1.0,
) -> np.ndarray:
    """Logprobs of all generated tokens by transformers in float32 and in float64, [2, tokens].

    `temperatures` is a number, or has one value for `scored` per completion.
    """
    if isinstance(temperatures, float):
        temperatures = [temperatures] * len(completions)

    def compute(model: Any) -> list[float]:
        pairs = zip(completions, temperatures, strict=True)
        return [each for pair in pairs for each in scored(model, *pair)]

    return np.array([compute(model), exact_result(compute, model)])


def assert_exact_logprobs(
    completions: Sequence[Completion], expected: np.ndarray, tokens: np.ndarray | None = None
) -> None:
    """The engine's logprobs of `tokens`, by default of all, are as exact as transformers'.

    `expected` is as from `trainer_logprobs`.
    """
    chosen = slice(None) if tokens is None else tokens
    ours = np.concatenate([each.logprobs for each in completions])[chosen]
    plain, exact = torch.from_numpy(expected[:, chosen])
    assert is_as_exact_as_torch(torch.from_numpy(ours), plain, exact, largest_value=LARGEST_LOGIT)


def assert_greedy_matches(
    engine: Engine, model: Any, prompts: Sequence[Sequence[int]] = PROMPTS
) -> None:
    """Compare greedy tokens and logprobs of the engine with those of transformers."""
    completions = sampled(engine, GREEDY, requests(prompts))
    assert tokens(completions) == [plain_greedy(model, prompt, 12) for prompt in prompts]
    assert_exact_logprobs(completions, trainer_logprobs(model, completions))


def across_weights(
    engine: Any, newer_model: Callable[[int], Any], sampling: Sampling
) -> list[Completion]:
    """Twenty completions in three growing rows, a common prefix and new weights in between."""
    steps: list[int] = []

    def between_steps() -> None:
        steps.append(1)
        if len(steps) % 30 == 0:
            weights = models.weights_of(newer_model(len(steps)))
            engine.apply(WeightUpdate(engine.step + 1, weights))

    batch = [
        Request(
            number,
            np.array([*range(10, 30), 40 + number // 2], np.int32),
            replace(
                sampling,
                max_completion_length=min(5 + number * 3, sampling.max_completion_length),
            ),
        )
        for number in range(20)
    ]
    completions = completed(engine, batch, between_steps=between_steps)
    return sorted(completions, key=lambda each: each.index)
