"""Models of published layouts: logprobs beyond each window and each original length.

docs/models.md has the results for the families. To write it again:
PERALTA_WRITE_DOCS=1 .venv/bin/python -m pytest tests/models/test_families.py -m slow
The columns of mlx-lm and vLLM come from test_other_libraries.py.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import completed
from families import FAMILIES, LAYERS, ORIGINAL, WINDOW, random_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from peralta_zmq import models
from peralta_zmq.engines.native import decoder, native_engine
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import lora
from peralta_zmq.models.frozen_base import load_frozen_base
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.models.tree_attention import TreeLayout
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import PrefixTree, Request, Sampling, TreeSpan

PAGE = Path(__file__).parents[2] / "docs/models.md"
OTHER_LIBRARIES = json.loads((Path(__file__).parent / "other_libraries.json").read_text("utf-8"))
# Families whose files have other tensor names than transformers.
NOT_PACKED = {"Qwen3-MoE", "Granite 4 hybrid", "DeepSeek-V3", "Nemotron-H"}
# Largest difference of a logprob from that of a forward pass of its sequence alone, in fp32. The
# logits are below 30, so that one of 2**-24 times their size is 2e-6.
TOLERANCE = 1e-4
# Short and long completions of a prompt, one of which branches from another; a short sequence; and
# one that is computed by span (tree_attention.py). The long ones exceed WINDOW and ORIGINAL.
TREES = [
    PrefixTree((TreeSpan(-1, 5), TreeSpan(4, 90), TreeSpan(4, 8), TreeSpan(30, 20))),
    PrefixTree((TreeSpan(-1, 10), TreeSpan(9, 3))),
    PrefixTree((TreeSpan(-1, 4), TreeSpan(3, 250))),
]
PROMPTS = (3, 40, 70, 7, 3, 31)  # tokens; a batch of the hf engine is padded to the longest
# Other models with a trait of their own.
OTHERS: dict[str, dict[str, Any]] = {
    "chunked attention": {"model_type": "llama4_text", "attention_chunk_size": WINDOW,
                          "head_dim": 16, "intermediate_size_mlp": 96, "floor_scale": ORIGINAL,
                          "num_local_experts": 2, "no_rope_layers": [1, 1, 1, 0]},
    "dynamic NTK": {"model_type": "llama", "max_position_embeddings": ORIGINAL,
                    "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "mask made by the model": {"model_type": "falcon", "num_kv_heads": 2, "bias": False,
                               "new_decoder_architecture": True, "alibi": False},
    "mask changed by the model": {"model_type": "doge"},
    "softcap": {**FAMILIES["Gemma 2"], "layer_types": LAYERS},
    "layers without rotary embedding": {
        "model_type": "beam", "layer_types": LAYERS, "sliding_window": WINDOW},
}  # fmt: skip
KINDS = {
    **OTHERS,
    **{name: FAMILIES[name] for name in ("Qwen3.5", "Mistral 7B v0.1", "Gemma 3 1B", "Phi-4-mini")},
}
PADDED = {
    "chunked attention",
    "mask made by the model",
    "mask changed by the model",
    "softcap",
    "Qwen3.5",
}


def row() -> Tensor:
    """Random tokens of TREES."""
    length = sum(tree.num_tokens for tree in TREES)
    return torch.randint(3, 468, (length,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def alone(model: Any, sequence: Tensor) -> Tensor:
    """Logprobs of the tokens after the first one, by transformers.

    The model is copied, because dynamic NTK keeps the frequencies of longer sequences.
    """
    logprobs = copy.deepcopy(model)(sequence[None], use_cache=False).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, sequence[1:, None])[:, 0]


def plain(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Indices in the row of the completions' tokens, and their logprobs."""
    scored, logprobs, start = list[Tensor](), list[Tensor](), 0
    for tree in TREES:
        layout = TreeLayout(tree)
        for span, (parent, size) in enumerate(tree.spans):
            if parent >= 0:
                path = torch.from_numpy(start + layout.path(span))
                scored.append(path[-size:])
                logprobs.append(alone(model, tokens[path])[-size:])
        start += tree.num_tokens
    return torch.cat(scored), torch.cat(logprobs)


def scored_error(model: Any) -> tuple[Scorer, float]:
    """A scorer of the model, and its largest error in TREES."""
    tokens = row()
    scored, expected = plain(model, tokens)
    scorer = Scorer(model)
    with torch.no_grad():
        return scorer, float((scorer(tokens, TREES, scored) - expected).abs().max())


@pytest.mark.parametrize("kind", list(KINDS))
def test_long_and_short_sequences_have_the_logprobs_of_each_alone(kind: str) -> None:
    scorer, error = scored_error(random_model(KINDS[kind]))
    assert error < TOLERANCE, (scorer.padding_reason, scorer.whole_logits_reason)
    assert scorer.packs == (kind not in PADDED)
    assert scorer.packs or scorer.padding_reason.startswith("padded rows: ")


def test_refused_packed_rows_leave_the_model_as_it_was() -> None:
    kind = OTHERS["mask made by the model"]
    Scorer(random_model(kind))  # replaces the rotary embedding of the family, with other last bits
    model = random_model(kind)
    before = alone(model, row()[:60])
    assert not Scorer(model).packs
    assert torch.equal(alone(model, row()[:60]), before)


@torch.no_grad()
def test_bfloat16_takes_values_narrower_than_keys() -> None:
    """As of DeepSeek, without experts, which rounding would choose otherwise."""
    model = random_model({**FAMILIES["DeepSeek-V3"], "first_k_dense_replace": 4}, scale=1.0)
    scored, expected = plain(model, row())
    scorer = Scorer(model, dtype=torch.bfloat16)
    error = (scorer(row(), TREES, scored) - expected).abs()
    # Logits below 1 in bfloat16, whose steps are 2**-8 of a value, and four layers.
    assert scorer.packs and error.max() < 0.02


def mixing(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The model, with the hidden states [B, T, H] of its first layer changed."""
    model.model.layers[0].register_forward_hook(lambda _, __, hidden: change(hidden))
    return model


def llama(**settings: Any) -> Any:
    return random_model({"model_type": "mistral", "num_hidden_layers": 2, **settings})


def test_trial_is_longer_than_the_window() -> None:
    def change(hidden: Tensor) -> Tensor:
        """Scale tokens by their index in the row, not their position, beyond the window."""
        return hidden * (1 + (torch.arange(hidden.shape[1]) >= WINDOW))[:, None]

    scorer, error = scored_error(mixing(llama(sliding_window=WINDOW), change))
    assert error < TOLERANCE and scorer.padding_reason.startswith("padded rows: logprobs")


def test_rows_below_a_change_of_the_rotary_embedding_are_compared_too() -> None:
    def change(hidden: Tensor) -> Tensor:
        """Scale tokens by their index in the row, not their position."""
        return hidden * (1 + (torch.arange(hidden.shape[1]) >= 16))[:, None]

    changed = mixing(random_model(OTHERS["dynamic NTK"]), change)
    assert Scorer(changed).padding_reason.startswith("padded rows: logprobs")


def test_trial_is_not_longer_than_the_sequences_of_the_run() -> None:
    lengths = list[int]()
    model = mixing(llama(sliding_window=96), lambda hidden: lengths.append(hidden.shape[1]))
    Scorer(model, max_length=96)
    assert max(lengths) <= 20


@pytest.mark.parametrize(
    "change",
    [
        lambda hidden: hidden + hidden.mean((0, 1)),
        lambda hidden: hidden * (1 + (hidden.shape[1] > WINDOW)),
    ],
    ids=["all rows", "longest row"],
)
def test_model_that_depends_on_other_rows_is_refused_in_one_line(
    change: Callable[[Tensor], Tensor],
) -> None:
    model = mixing(llama(sliding_window=WINDOW), change)
    with pytest.raises(ConfigError, match=r"cannot be trained: logprobs .* differ by") as caught:
        Scorer(model)
    assert "\n" not in str(caught.value)


class Convolution(torch.nn.Module):
    """Adds a thousandth of the previous token's hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(128, 128, 2, padding=1, groups=128, bias=False)
        self.conv.weight.data = 1e-3 * torch.tensor([1.0, 0.0]).expand(128, 1, 2).clone()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.conv(hidden.transpose(1, 2))[..., :-1].transpose(1, 2)


def test_model_with_a_weak_convolution_is_padded() -> None:
    """Its effect across the border of two sequences may be below the trial's tolerance."""
    model = llama()
    convolution = model.model.layers[0].conv = Convolution()
    scorer, error = scored_error(mixing(model, convolution))
    assert error < TOLERANCE and "convolution" in scorer.padding_reason


class RunningMean(torch.nn.Module):
    """In place of attention: a small part of the mean of the tokens up to each one."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        counts = torch.arange(1, 1 + hidden_states.shape[1])[:, None]
        return 1e-3 * hidden_states.cumsum(1) / counts, None


def test_model_with_a_layer_without_attention_is_padded() -> None:
    model = llama()
    model.model.layers[0].self_attn = RunningMean()
    scorer, error = scored_error(model)
    assert error < TOLERANCE
    assert scorer.padding_reason == "padded rows: 1 of 2 layers have attention"


def test_engine_refuses_lengths_at_which_the_embedding_changes(tmp_path: Path) -> None:
    random_model(FAMILIES["Phi-4-mini"], folder=tmp_path)
    with pytest.raises(ConfigError, match=f"set engine.max_model_len to at most {ORIGINAL}$"):
        opened(tmp_path, max_model_len=ORIGINAL + 1)
    assert opened(tmp_path, max_model_len=ORIGINAL).max_model_len == ORIGINAL


def opened(folder: Path, *, max_model_len: int) -> Any:
    settings = EngineSettings(device="cpu", dtype="float32", slots=8, max_model_len=max_model_len)
    return native_engine.open(folder, settings)


def measured(family: str, folder: Path) -> list[str]:
    """Cells of a row of the table in docs/models.md; checks the errors of the logprobs."""
    model = random_model(FAMILIES[family], folder=folder)
    length = ORIGINAL if "longrope" in str(FAMILIES[family]) else 140
    engine = opened(folder, max_model_len=length)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 468, min(size, length - 20)) for size in PROMPTS]
    sampling = Sampling(max_completion_length=min(60, length - 12), min_tokens=12, seed=0)
    requests = [Request(index, ids.astype(np.int32), sampling) for index, ids in enumerate(prompts)]
    engine_error = 0.0
    for completion in completed(engine, requests):
        ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.token_ids]))
        expected = alone(model, ids.long())[-len(completion.token_ids) :]
        gap = (torch.from_numpy(completion.logprobs) - expected).abs().max()
        engine_error = max(engine_error, float(gap))
    scorer, error = scored_error(copy.deepcopy(model))
    model.save_pretrained(folder / "saved")
    again = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32).eval()
    assert torch.equal(alone(again, row()[:60]), alone(model, row()[:60]))
    assert max(error, engine_error, merged_error(model)) < TOLERANCE
    rows = "packed" if scorer.packs else scorer.padding_reason.replace("padded rows: ", "padded: ")
    name = "native" if FAMILIES[family]["model_type"] in decoder.FAMILIES else "hf"
    assert lora.has_adapters(with_adapters(model))
    assert can_be_packed(folder) == (family not in NOT_PACKED)
    others = [results[family] for results in OTHER_LIBRARIES.values()]
    return [family, f"`{FAMILIES[family]['model_type']}`", rows, name, *others]


def with_adapters(model: Any) -> Any:
    """A copy of the model with random adapters."""
    adapted = copy.deepcopy(model)
    lora.add_adapters(adapted, rank=2, alpha=2)
    random = torch.Generator().manual_seed(0)
    for parameter in lora.trained_parameters(adapted).values():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    return adapted


def merged_error(model: Any) -> float:
    """The largest difference of a logprob with adapters from that with merged weights."""
    adapted, merged = with_adapters(model), copy.deepcopy(model)
    weights = lora.merged_weights(models.weights_of(model), lora.published_weights(adapted))
    models.apply_weights(merged, weights)
    tokens = row()[:60]
    return float((alone(adapted, tokens) - alone(merged, tokens)).abs().max())


def can_be_packed(folder: Path) -> bool:
    """True if the weights can be packed for adapters."""
    try:
        load_frozen_base(folder, "int8", device=torch.device("cpu"))
    except ConfigError as error:
        assert "is only in the files" in str(error)
        return False
    return True


def table(rows: list[list[str]]) -> str:
    """The table of docs/models.md."""
    libraries = [results["version"] for results in OTHER_LIBRARIES.values()]
    titles = ["family", "model_type", "trainer", "engine", *libraries]
    lines = [f"| {' | '.join(cells)} |" for cells in [titles, *rows]]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft, for experts
def test_table_of_families_is_what_they_measure(tmp_path: Path) -> None:
    rows = [measured(name, tmp_path / str(index)) for index, name in enumerate(FAMILIES)]
    page = PAGE.read_text("utf-8")
    expected = page.partition("| family |")[0] + table(rows) + "\n"
    if os.environ.get("PERALTA_WRITE_DOCS"):
        PAGE.write_text(expected, "utf-8")
    else:
        assert page == expected
