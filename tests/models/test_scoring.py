from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_layers import is_as_exact_as_torch
from sample_data import VOCAB_SIZE, tiny_model, token_logprobs
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.models.scoring import Scorer, set_checkpointing
from peralta_zmq.rollout import PrefixTree, TreeSpan

# two prompts with completions, one of which branches from another, and one token before two
TREES = [
    PrefixTree((TreeSpan(-1, 3), TreeSpan(2, 3), TreeSpan(3, 2), TreeSpan(2, 1))),
    PrefixTree((TreeSpan(-1, 5), TreeSpan(4, 3))),
    PrefixTree((TreeSpan(-1, 1), TreeSpan(0, 1), TreeSpan(0, 2))),
]
SCORED = [*range(3, 9), *range(14, 17), *range(18, 21)]
SEQUENCES = [  # indices in the row, and the first index that no earlier sequence has
    ([0, 1, 2, 3, 4, 5], 3), ([0, 1, 2, 3, 6, 7], 4), ([0, 1, 2, 8], 3),
    ([9, 10, 11, 12, 13, 14, 15, 16], 5),
    ([17, 18], 1), ([17, 19, 20], 1),
]  # fmt: skip
REPLACED_LOGITS = {  # models that change their logits, or have a bias
    "gemma2": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 2.0},
    "phi": {},
}
OTHERS = {  # need padded rows: a sliding window and a cap on scores; another attention
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "bloom": {"n_layer": 2, "n_head": 2},
}


def row(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens of TREES, and the indices of the completions."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (21,), generator=random)
    return tokens, torch.tensor(SCORED)


def plainly(model: Any, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs of the scored tokens, computed sequence by sequence."""
    found = list[Tensor]()
    for places, first in SEQUENCES:
        logprobs = token_logprobs(model, tokens[places][None], temperature=temperature)
        found.append(logprobs[0, first:])
    return torch.cat(found)


def assert_as_exact_as_plainly(
    ours: Tensor, tokens: Tensor, temperature: float = 1.0, **settings: Any
) -> None:
    """Compare the logprobs of `tiny_model(**settings)` with those computed in float64.

    In float64, too, transformers' norms and rotary embeddings compute in fp32.
    """
    model = tiny_model(**settings)
    plain = plainly(model, tokens, temperature)
    assert is_as_exact_as_torch(ours, plain, plainly(model.double(), tokens, temperature))


def scorer_of(model: Any, way: str) -> Scorer:
    scorer = Scorer(model)
    scorer.padding_reason = "" if way == "packed" else "forced by the test"
    return scorer


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_scorer_matches_each_sequence_alone(way: str, temperature: float) -> None:
    model, (tokens, scored) = tiny_model(), row()
    ours = scorer_of(model, way)(tokens, TREES, scored, temperature=temperature)
    assert_as_exact_as_plainly(ours, tokens, temperature)


def test_gradients_are_those_of_each_sequence_alone() -> None:
    """In float64, but transformers' norms and rotary embeddings compute in fp32."""
    packed, alone = tiny_model().double(), tiny_model().double()
    tokens, scored = row()
    weights = torch.arange(1.0, 1 + len(SCORED), dtype=torch.float64)
    scorer = Scorer(packed)
    assert scorer.packs
    (weights * scorer(tokens, TREES, scored)).sum().backward()
    logprobs = [
        token_logprobs(alone, tokens[places][None])[0, first:] for places, first in SEQUENCES
    ]
    (weights * torch.cat(logprobs)).sum().backward()
    for ours, expected in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_scorer_takes_a_temperature_per_token() -> None:
    model, (tokens, scored) = tiny_model(), row()
    few, temperatures = [1, 4, 9], [0.5, 1.0, 2.0]
    ours = Scorer(model)(tokens, TREES, scored[few], temperature=torch.tensor(temperatures))
    plain, exact = (
        torch.stack([plainly(each, tokens, t)[n] for n, t in zip(few, temperatures, strict=True)])
        for each in (tiny_model(), tiny_model().double())
    )
    assert is_as_exact_as_torch(ours, plain, exact)


@torch.no_grad()
def test_scorer_repeats_tokens_shared_by_siblings() -> None:
    model, (tokens, scored) = tiny_model(), row()
    scorer, again = Scorer(model), torch.tensor([3, 4, 3, 6, 4])
    once = dict(zip(SCORED, scorer(tokens, TREES, scored).tolist(), strict=True))
    assert scorer(tokens, TREES, again).tolist() == [once[each] for each in again.tolist()]


@torch.no_grad()
def test_forward_pass_without_trees_is_unchanged() -> None:
    model, (tokens, scored) = tiny_model(), row()
    scorer, ids = Scorer(model), torch.tensor([[5, 9, 33, 0]])
    before = model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0]])).logits
    scorer(tokens, TREES, scored)
    after = model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0]])).logits
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", list(OTHERS))
@torch.no_grad()
def test_model_that_cannot_pack_is_padded_with_reason(kind: str) -> None:
    model, (tokens, scored) = tiny_model(model_type=kind, **OTHERS[kind]), row()
    scorer = Scorer(model)
    assert not scorer.packs
    assert scorer.padding_reason.startswith("padded rows: ") and "\n" not in scorer.padding_reason
    ours = scorer(tokens, TREES, scored)
    assert_as_exact_as_plainly(ours, tokens, model_type=kind, **OTHERS[kind])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_models_of_other_families_are_packed(kind: str) -> None:
    assert Scorer(tiny_model(model_type=kind)).padding_reason == ""


def gradient(
    model: Any, tokens: Tensor, trees: list[PrefixTree], scored: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Logprobs and the flat gradient of their sum."""
    logprobs = Scorer(model, **options)(tokens, trees, scored)
    logprobs.sum().backward()
    flat = torch.cat([each.grad.flatten() for each in model.parameters()])
    model.zero_grad()
    return logprobs.detach(), flat


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("padding", [None, 5])
def test_tied_embedding_gets_both_gradients(way: str, padding: int | None) -> None:
    model, (tokens, scored) = tiny_model(tie_word_embeddings=True, pad_token_id=padding), row()
    tokens[::4] = 5
    parameters = list(model.parameters())
    rows = [token_logprobs(model, tokens[places][None])[0, first:] for places, first in SEQUENCES]
    expected = torch.autograd.grad(torch.cat(rows).sum(), parameters)
    for _ in range(2):  # micro-batches add up
        scorer = scorer_of(model, way)
        assert scorer.whole_logits_reason == ""
        scorer(tokens, TREES, scored).sum().backward()
    for parameter, each in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter.grad, 2 * each, atol=1e-5)


@pytest.mark.parametrize("length", [21, 100, 200])  # the row, below and in MATMUL_LENGTHS
def test_bfloat16_scorer_is_near_fp32(length: int) -> None:
    (tokens, scored), trees = row(), TREES
    if length > 21:
        tokens = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(0))
        trees = [PrefixTree((TreeSpan(-1, 20), TreeSpan(19, 40), TreeSpan(19, length - 60)))]
        scored = torch.arange(20, length)
    model = tiny_model()
    exact, expected = gradient(model, tokens, trees, scored)
    narrow, found = gradient(model, tokens, trees, scored, dtype=torch.bfloat16)
    assert not torch.equal(narrow, exact)
    assert (narrow - exact).abs().max() < 0.05
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.999
    assert {each.dtype for each in (narrow, found, *model.parameters())} == {torch.float32}


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    tokens, scored = row()
    logprobs, expected = gradient(tiny_model(), tokens, TREES, scored)
    model = tiny_model(attention_dropout=0.5)
    again, found = gradient(model, tokens, TREES, scored, gradient_checkpointing=True)
    assert torch.equal(again, logprobs)  # no dropout either
    assert torch.allclose(found, expected, atol=1e-6)


def test_gradient_checkpointing_computes_layers_twice() -> None:
    model, counts = tiny_model(), list[int]()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: counts.append(1))
    scorer = Scorer(model, gradient_checkpointing=True)
    counts.clear()
    tokens, scored = row()
    scorer(tokens, TREES, scored).sum().backward()
    assert len(counts) == 2


class _OldModel:
    """A model of a transformers release without activation_checkpointing_enable."""

    def __init__(self) -> None:
        self.options: list[dict[str, bool] | None] = []

    def gradient_checkpointing_enable(self, options: dict[str, bool]) -> None:
        self.options.append(options)

    def gradient_checkpointing_disable(self) -> None:
        self.options.append(None)


def test_checkpointing_uses_the_name_of_older_transformers() -> None:
    model: Any = _OldModel()
    set_checkpointing(model, enabled=True)
    set_checkpointing(model, enabled=False)
    assert model.options == [{"use_reentrant": False}, None]


def test_training_dtype_of_narrow_model_is_float32_on_cpu() -> None:
    dtype, reason = models.training_dtype(tiny_model())
    assert dtype == torch.float32 and reason.startswith("auto: ")


def test_named_training_dtype_is_used() -> None:
    chosen = models.training_dtype(tiny_model(), "bfloat16")
    assert chosen == (torch.bfloat16, "set by train.dtype")


@pytest.mark.parametrize("way", ["packed", "padded"])
@torch.no_grad()
def test_with_entropy_returns_the_same_logprobs(way: str) -> None:
    model, (tokens, scored) = tiny_model(), row()
    scorer = scorer_of(model, way)
    temperatures = torch.linspace(0.5, 1.5, len(scored))
    logprobs, entropy = scorer.with_entropy(tokens, TREES, scored, temperature=temperatures)
    assert torch.allclose(
        logprobs, scorer(tokens, TREES, scored, temperature=temperatures), atol=1e-6
    )
    assert entropy.shape == logprobs.shape
    assert (entropy > 3).all() and (entropy < 4.16).all()  # a random model is near ln 64


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_in_chunks_gives_the_results_of_whole_logits(way: str, dtype: torch.dtype) -> None:
    """Equal but for rounding, which differs more in bfloat16: its sums of chunks are in fp32."""
    tokens, scored = row()
    results = list[list[Tensor]]()
    for reason in ("", "forced by the test"):
        model = tiny_model(tie_word_embeddings=True)
        scorer = Scorer(model, dtype=dtype)
        assert scorer.whole_logits_reason == ""
        scorer.padding_reason = "" if way == "packed" else "forced by the test"
        scorer.whole_logits_reason = reason
        logprobs, entropies = scorer.with_entropy(tokens, TREES, scored, temperature=0.7)
        (logprobs.sum() + 2 * entropies.sum()).backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        results.append([logprobs, entropies, gradient])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_frozen_head_gives_the_gradient_of_whole_logits() -> None:
    """As with LoRA: the head is frozen, and layers before it are trained."""
    tokens, scored = row()
    gradients = list[Tensor]()
    for reason in ("", "forced by the test"):
        model: Any = tiny_model(tie_word_embeddings=True)
        model.requires_grad_(False)
        trained = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        scorer = Scorer(model)
        assert scorer.whole_logits_reason == ""
        scorer.whole_logits_reason = reason
        for _ in range(2):  # micro-batches add up
            scorer(tokens, TREES, scored, temperature=0.7).sum().backward()
        gradients.append(trained.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6) and gradients[0].any()


def test_head_is_restored_after_an_exception() -> None:
    model, (tokens, scored) = tiny_model(), row()
    scorer, head = Scorer(model), model.get_output_embeddings()
    with pytest.raises(RuntimeError, match="expanded size"):
        scorer(tokens, TREES, scored, temperature=torch.ones(2))
    assert "forward" not in vars(head)


@pytest.mark.parametrize("kind", list(REPLACED_LOGITS))
@torch.no_grad()
def test_model_that_changes_its_logits_computes_whole_logits(kind: str) -> None:
    model, (tokens, scored) = tiny_model(model_type=kind, **REPLACED_LOGITS[kind]), row()
    scorer = Scorer(model)
    assert scorer.whole_logits_reason.startswith("whole logits: ")
    assert "\n" not in scorer.whole_logits_reason
    ours = scorer(tokens, TREES, scored)
    assert_as_exact_as_plainly(ours, tokens, model_type=kind, **REPLACED_LOGITS[kind])
