"""The completions under way, one per row: plain arrays, index = row. Knows nothing of models."""

from __future__ import annotations

import numpy as np

from peralta_zmq.rollout import Request, Sampling


class Rows:
    """Up to `num_rows` completions; those that run stand in the first `count` rows."""

    def __init__(self, num_rows: int, sampling: Sampling) -> None:
        shape = (num_rows, sampling.max_completion_length)
        self._seed, self._longest = sampling.seed, sampling.max_completion_length
        self.count = 0
        self.requests: list[Request] = []
        self.tokens = np.zeros(shape, np.int64)
        self.logprobs = np.zeros(shape, np.float32)
        self.steps = np.zeros(shape, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.limits = np.zeros(num_rows, np.int64)  # on num_tokens
        self._chances = np.zeros(shape, np.float32)

    def start(self, request: Request) -> int:
        """Give `request` the next row. Its randomness depends on nothing but seed and index."""
        row, self.count = self.count, self.count + 1
        self.requests.append(request)
        self.num_tokens[row], self.num_prompt[row] = 0, len(request.prompt_ids)
        asked = request.max_completion_length
        self.limits[row] = self._longest if asked is None else min(asked, self._longest)
        stream = np.random.Generator(np.random.Philox(key=[self._seed, request.index]))
        self._chances[row] = stream.random(self._chances.shape[1], dtype=np.float32)
        return row

    def chances(self, rows: np.ndarray) -> np.ndarray:
        """One number in [0, 1) for the next token of each of `rows`."""
        return self._chances[rows, self.num_tokens[rows]]

    def add(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, *, step: int) -> None:
        """One more token for each of `rows`, sampled by the weights of `step`."""
        places = self.num_tokens[rows]
        self.tokens[rows, places] = tokens
        self.logprobs[rows, places] = logprobs
        self.steps[rows, places] = step
        self.num_tokens[rows] = places + 1

    def newest(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest token of each running row and its place in the sequence, [count] each."""
        last = self.num_tokens[: self.count] - 1
        return self.tokens[np.arange(self.count), last], self.num_prompt[: self.count] + last

    def remove(self, row: int) -> int:
        """End a row; the last one takes its place. Returns where that one stood."""
        self.count -= 1
        last = self.count
        for each in (self.tokens, self.logprobs, self.steps, self._chances):
            each[row] = each[last]
        for each in (self.num_tokens, self.num_prompt, self.limits):
            each[row] = each[last]
        self.requests[row] = self.requests[last]
        self.requests.pop()
        return last

    def length(self, row: int) -> int:
        """Tokens of prompt and completion."""
        return int(self.num_prompt[row] + self.num_tokens[row])
