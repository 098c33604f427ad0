"""Batches of the engine on transformers' code; test_every_engine.py has what all engines keep."""

from __future__ import annotations

from typing import Any

import pytest
from engine_data import (
    GREEDY,
    completed,
    requests,
    sampled,
    sharp_model,
    tokens,
    with_sampling,
)
from sample_data import tiny_model

from peralta_zmq.engines import hf_engine
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Sampling

PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46]]
# Models whose inputs or caches differ from those of Llama.
OTHERS = {
    "learned positions": {"model_type": "gpt2"},
    "no position_ids": {"model_type": "bloom"},
    "recurrent state": {"model_type": "mamba"},
}


@pytest.mark.parametrize("settings", list(OTHERS.values()), ids=list(OTHERS))
def test_padding_of_a_batch_changes_no_token(settings: dict[str, Any], tokenizer: Any) -> None:
    engine = hf_engine.open_live(
        tiny_model(**settings), tokenizer, EngineSettings(max_model_len=64)
    )
    sampling = Sampling(max_completion_length=12, min_tokens=12)
    batch = with_sampling(sampling, requests(PROMPTS))
    together = tokens(sorted(completed(engine, batch), key=lambda each: each.index))
    alone = [tokens(list(completed(engine, [request])))[0] for request in batch]
    assert together == alone


def test_rows_that_have_ended_take_no_positions(tokenizer: Any) -> None:
    """A short prompt is continued beyond the end of the context of a long one."""
    model = tiny_model(model_type="gpt2", max_position_embeddings=24)
    engine = hf_engine.open_live(model, tokenizer, EngineSettings())
    sampling = Sampling(max_completion_length=20, min_tokens=20)
    long, short = sampled(engine, sampling, requests([[5] * 22, [7]]))
    assert (len(long.token_ids), len(short.token_ids)) == (2, 20)


def test_next_batch_starts_when_all_rows_have_ended(tokenizer: Any) -> None:
    engine = hf_engine.open_live(sharp_model(), tokenizer, EngineSettings(slots=2))
    first, second, third = with_sampling(GREEDY, requests(PROMPTS))
    engine.submit([first])
    engine.advance()
    engine.submit([second])
    assert engine.num_free() == 0
    ended: list[set[int]] = []
    while len(ended) < 2:
        if completions := engine.advance():
            ended.append({each.index for each in completions})
            if len(ended) == 1:
                engine.submit([third])
    assert ended == [{0}, {1, 2}]
