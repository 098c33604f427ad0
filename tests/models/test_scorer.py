from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exactness import assert_as_exact
from sample_data import VOCAB_SIZE, tiny_model
from torch import Tensor

from peralta_zmq.models.scorer import Scorer, set_checkpointing
from peralta_zmq.rollout import PrefixTree, TreeSpan

# two prompts with completions, one of which branches from another, one token before two, and two
# sequences that begin with the first tree
TREES = [
    PrefixTree((TreeSpan(-1, 2),)),
    PrefixTree((TreeSpan(-1, 3), TreeSpan(2, 3), TreeSpan(3, 2), TreeSpan(2, 1))),
    PrefixTree((TreeSpan(-1, 5), TreeSpan(4, 3))),
    PrefixTree((TreeSpan(-1, 1), TreeSpan(0, 1), TreeSpan(0, 2))),
    PrefixTree((TreeSpan(-1, 2), TreeSpan(1, 2), TreeSpan(-1, 3)), after=2),
]
NUM_TOKENS = 30
SCORED = [*range(5, 11), *range(16, 19), *range(20, 30)]
Sequences = Sequence[tuple[Sequence[int], int]]
SEQUENCES: Sequences = [  # indices in the row, and the first index that no earlier sequence has
    ([2, 3, 4, 5, 6, 7], 3), ([2, 3, 4, 5, 8, 9], 4), ([2, 3, 4, 10], 3),
    ([11, 12, 13, 14, 15, 16, 17, 18], 5),
    ([19, 20], 1), ([19, 21, 22], 1),
    ([0, 1, 23, 24, 25, 26], 2), ([0, 1, 27, 28, 29], 2),
]  # fmt: skip
WEIGHTS = torch.tensor([[1.0], [2.0]])  # of logprobs and entropies
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
    tokens = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=random)
    return tokens, torch.tensor(SCORED)


def plainly(
    model: Any,
    tokens: Tensor,
    temperature: Tensor | float = 1.0,  # a number, or one per scored token [N]
    *,
    sequences: Sequences = SEQUENCES,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logprobs and entropies of the scored tokens [2, N], computed sequence by sequence.

    A `dtype` other than float32 is used by autocast, which leaves a float64 model in float64.
    """
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = torch.cat([
            model(input_ids=tokens[places][None], use_cache=False).logits[0, first - 1 : -1]
            for places, first in sequences
        ])  # fmt: skip
    temperature = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    every = (logits.float() / temperature).log_softmax(-1)
    targets = torch.cat([tokens[places[first:]] for places, first in sequences])
    logprobs = every.gather(-1, targets[:, None])[:, 0]
    return torch.stack([logprobs, -(every.exp() * every).sum(-1)])


def flat_gradient(model: Any, terms: Tensor) -> Tensor:
    """The gradient of the sum of `terms` with respect to all trained parameters."""
    terms.sum().backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.requires_grad])


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
    assert_as_exact(ours, lambda model: plainly(model, tokens, temperature)[0], tiny_model())


def test_gradients_are_those_of_each_sequence_alone() -> None:
    model, (tokens, scored) = tiny_model(), row()
    weights = torch.arange(1.0, 1 + len(SCORED))
    scorer = Scorer(model)
    assert scorer.packs
    assert_as_exact(
        flat_gradient(model, weights * scorer(tokens, TREES, scored)),
        lambda model: flat_gradient(model, weights * plainly(model, tokens)[0]),
        tiny_model(),
    )


@torch.no_grad()
def test_scorer_repeats_tokens_shared_by_siblings() -> None:
    model, (tokens, _) = tiny_model(), row()
    again = torch.tensor([5, 6, 5, 8, 6])
    places = [SCORED.index(each) for each in again.tolist()]
    ours = Scorer(model)(tokens, TREES, again)
    assert_as_exact(ours, lambda model: plainly(model, tokens)[0, places], tiny_model())


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
    ours, plain = scorer(tokens, TREES, scored), tiny_model(model_type=kind, **OTHERS[kind])
    assert_as_exact(ours, lambda model: plainly(model, tokens)[0], plain)


def gradient(
    model: Any, tokens: Tensor, trees: list[PrefixTree], scored: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Logprobs and the flat gradient of their sum."""
    logprobs = Scorer(model, **options)(tokens, trees, scored)
    return logprobs.detach(), flat_gradient(model, logprobs)


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("padding", [None, 5])
def test_tied_embedding_gets_both_gradients(way: str, padding: int | None) -> None:
    settings = {"tie_word_embeddings": True, "pad_token_id": padding}
    model, (tokens, scored) = tiny_model(**settings), row()
    tokens[::4] = 5
    for _ in range(2):  # micro-batches add up
        scorer = scorer_of(model, way)
        assert scorer.whole_logits_reason == ""
        ours = flat_gradient(model, scorer(tokens, TREES, scored)) / 2
    assert_as_exact(
        ours, lambda model: flat_gradient(model, plainly(model, tokens)[0]), tiny_model(**settings)
    )


@pytest.mark.parametrize("length", [NUM_TOKENS, 100, 200, 400, 700])  # whole trees; by span
def test_bfloat16_scorer_is_as_exact_as_autocast(length: int) -> None:
    (tokens, scored), trees, sequences = row(), TREES, SEQUENCES
    if length > NUM_TOKENS:
        tokens = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(0))
        trees = [PrefixTree((TreeSpan(-1, 20), TreeSpan(19, 40), TreeSpan(19, length - 60)))]
        scored, prompt = torch.arange(20, length), list(range(20))
        sequences = [([*prompt, *range(20, 60)], 20), ([*prompt, *range(60, length)], 20)]
    model = tiny_model()
    found = gradient(model, tokens, trees, scored, dtype=torch.bfloat16)
    assert {each.dtype for each in (*found, *model.parameters())} == {torch.float32}
    wide, _ = gradient(tiny_model(), tokens, trees, scored)
    assert not torch.equal(found[0], wide)

    def plain(model: Any) -> Tensor:
        return plainly(model, tokens, sequences=sequences, dtype=torch.bfloat16)[0]

    assert_as_exact(found[0], plain, tiny_model())
    assert_as_exact(found[1], lambda model: flat_gradient(model, plain(model)), tiny_model())


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    tokens, scored = row()
    logprobs, _ = gradient(tiny_model(), tokens, TREES, scored)
    model = tiny_model(attention_dropout=0.5)
    again, found = gradient(model, tokens, TREES, scored, gradient_checkpointing=True)
    assert torch.equal(again, logprobs)  # no dropout either
    assert_as_exact(
        found, lambda model: flat_gradient(model, plainly(model, tokens)[0]), tiny_model()
    )


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


@pytest.mark.parametrize("way", ["packed", "padded"])
@torch.no_grad()
def test_logprobs_and_entropies_are_as_exact_as_transformers(way: str) -> None:
    model, (tokens, scored) = tiny_model(), row()
    scorer = scorer_of(model, way)
    temperatures = torch.linspace(0.5, 1.5, len(scored))
    ours = torch.stack(scorer.with_entropy(tokens, TREES, scored, temperature=temperatures))
    assert_as_exact(ours, lambda model: plainly(model, tokens, temperatures), tiny_model())


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_in_chunks_is_as_exact_as_transformers(way: str, dtype: torch.dtype) -> None:
    tokens, scored = row()

    def plain(model: Any) -> Tensor:
        return plainly(model, tokens, 0.7, dtype=dtype)

    for reason in ("", "forced by the test"):
        model = tiny_model(tie_word_embeddings=True)
        scorer = Scorer(model, dtype=dtype)
        assert scorer.whole_logits_reason == ""
        scorer.padding_reason = "" if way == "packed" else "forced by the test"
        scorer.whole_logits_reason = reason
        results = torch.stack(scorer.with_entropy(tokens, TREES, scored, temperature=0.7))
        for index in (0, 1):  # logprobs and entropies
            assert_as_exact(results[index], lambda model, n=index: plain(model)[n], tiny_model())
        gradient = flat_gradient(model, WEIGHTS * results)
        assert_as_exact(
            gradient, lambda model: flat_gradient(model, WEIGHTS * plain(model)), tiny_model()
        )


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
    ours, plain = (
        scorer(tokens, TREES, scored),
        tiny_model(model_type=kind, **REPLACED_LOGITS[kind]),
    )
    assert_as_exact(ours, lambda model: plainly(model, tokens)[0], plain)
