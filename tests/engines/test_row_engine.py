"""A request keeps its options when its row moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from peralta_zmq.engines.row_engine import Rows
from peralta_zmq.rollout import Request, SampledToken, Sampling


def test_moved_row_keeps_sampling_parameters_list_and_stop_string(tokenizer: Any) -> None:
    rows = Rows(4, tokenizer, end_ids=[0], max_model_len=64)
    prompt, sampled = np.array([5, 9], np.int32), list[SampledToken]()
    (word,) = tokenizer.encode("7", add_special_tokens=False)

    own = Sampling(temperature=0.5, stop=("7",))
    rows.start(Request(0, prompt))
    rows.start(Request(1, prompt, own, sampled=sampled))
    rows.remove(0)  # row 1 moves to the place of row 0
    rows.start(Request(2, prompt))  # in row 1, where the options were
    parts = rows.sampling_inputs(0, vocab_size=64)
    assert [(list(part), inputs.sampling.temperature) for part, inputs in parts] == [  # type: ignore[arg-type]
        ([0], 0.5),
        ([1], 1.0),
    ]
    tokens, logprobs = np.array([word, word]), np.zeros(2, np.float32)
    rows.append(np.arange(2), tokens, logprobs, step=0)
    assert sampled == [(word, 0.0, 0)]
    assert rows.ended() == [0]
