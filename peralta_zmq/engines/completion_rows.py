"""Rows of a batch: the completions in progress, their ends, and the policy step of each token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, EngineError
from peralta_zmq.rollout import BoolArray, Completion, Request, SampledToken, Sampling


def max_new_tokens(request: Request, max_model_len: int) -> int:
    room = max_model_len - len(request.prompt_ids)
    assert 0 < len(request.prompt_ids) < max_model_len, (len(request.prompt_ids), max_model_len)
    return min(request.sampling.max_completion_length, room)


def check_cache_memory(
    row_bytes: int,
    *,
    slots: int,
    max_model_len: int,
    free_bytes: int,
    rows_per_slot: float = 1.0,
    extra_rows: int = 0,
) -> None:
    """Raise ConfigError if the keys and values of all rows do not fit into the free memory.

    `row_bytes` is the size of one row of `max_model_len` tokens.
    """
    needed = row_bytes * (slots * rows_per_slot + extra_rows)
    if needed > free_bytes:
        max_slots = int((free_bytes / row_bytes - extra_rows) / rows_per_slot)
        remedy = f"use engine.slots {max_slots} or " if max_slots > 0 else "use "
        raise ConfigError(
            f"engine.slots {slots} of engine.max_model_len {max_model_len} tokens need "
            f"{needed / 2**30:.1f} GiB for keys and values, {free_bytes / 2**30:.1f} GiB are "
            f"free; "
            f"{remedy}a smaller engine.max_model_len"
        )


@lru_cache(maxsize=1024)  # so that rows with equal options mostly have the same object
def _token_options(sampling: Sampling) -> Sampling:
    """The parameters that `sample` reads, without those of whole completions."""
    return replace(
        sampling,
        min_tokens=0,
        max_completion_length=1,
        fills_context=False,
        stop=(),
        skip_special_tokens=False,
        seed=0,
    )


class SamplingInputs(NamedTuple):
    """What, beside the logits, determines the next tokens of n rows with equal options."""

    sampling: Sampling
    uniforms: np.ndarray  # [n], random numbers in [0, 1)
    seen: BoolArray | None = None  # [n, V], True: the repetition penalty applies
    banned: BoolArray | None = None  # [n, V], True: must not be sampled


class Rows:
    """The completions in progress as arrays, of which the first `count` rows are running."""

    def __init__(
        self,
        num_rows: int,
        tokenizer: models.Tokenizer,
        end_ids: Sequence[int],
        *,
        max_model_len: int,
    ) -> None:
        shape = (num_rows, max_model_len)
        self._tokenizer = tokenizer
        self._end_ids = np.array(end_ids, np.int64)
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.count = 0
        self.requests: list[Request] = []
        self._options: list[Sampling] = []  # without parameters of whole completions
        self.tokens = np.zeros(shape, np.int64)  # generated tokens
        self.logprobs = np.zeros(shape, np.float32)
        self.steps = np.zeros(shape, np.int32)  # policy step of each token
        self.num_tokens = np.zeros(num_rows, np.int64)  # tokens generated so far
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.limits = np.zeros(num_rows, np.int64)  # maximum of num_tokens
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._uniforms = np.zeros(shape, np.float32)  # random numbers for sampling, one per token

    def start(self, request: Request) -> None:
        """Put `request` into the next free row.

        The random number of a token depends only on its position, the seed and, unless the request
        is standalone, its index.
        """
        sampling = request.sampling
        row = self.count
        self.count += 1
        self.requests.append(request)
        self._options.append(_token_options(sampling))
        self.num_tokens[row] = 0
        self.num_prompt[row] = len(request.prompt_ids)
        self.limits[row] = limit = max_new_tokens(request, self.max_model_len)
        self._min_tokens[row] = sampling.min_tokens
        key = [sampling.seed, 0 if request.is_standalone else request.index]
        generator = np.random.Generator(np.random.Philox(key=key))
        self._uniforms[row, :limit] = generator.random(limit, dtype=np.float32)
        if (resumed := request.resumes) is not None:
            self.num_tokens[row] = length = len(resumed.token_ids)
            self.tokens[row, :length] = resumed.token_ids
            self.logprobs[row, :length] = resumed.logprobs
            self.steps[row, :length] = resumed.policy_steps

    def sampling_inputs(
        self, first_row: int, vocab_size: int
    ) -> Iterator[tuple[np.ndarray | slice, SamplingInputs]]:
        """Divide the rows from `first_row` on, from which their indices count, by options."""
        options = self._options[first_row:]
        rows = np.arange(first_row, self.count)
        divided: dict[int, list[int]] = {}  # id() of the options -> indices
        for index, each in enumerate(options):
            divided.setdefault(id(each), []).append(index)
        for indices in divided.values():
            # A slice makes no copy of the logits.
            part = slice(None) if len(divided) == 1 else np.array(indices)
            sampling = options[indices[0]]
            yield (
                part,
                SamplingInputs(
                    sampling,
                    self._uniforms[rows[part], self.num_tokens[rows[part]]],
                    self._seen_tokens(rows[part], sampling, vocab_size),
                    self._banned_tokens(rows[part], vocab_size),
                ),
            )

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, *, step: int
    ) -> None:
        """Add a token to each of `rows`; EngineError, with nothing added, for bad logprobs."""
        is_finite = np.isfinite(logprobs)
        if not is_finite.all():
            raise EngineError(
                f"the weights of step {step} give logits that are not finite in "
                f"{int((~is_finite).sum())} of {len(rows)} completions"
            )
        columns = self.num_tokens[rows]
        self.tokens[rows, columns] = tokens
        self.logprobs[rows, columns] = logprobs
        self.steps[rows, columns] = step
        self.num_tokens[rows] = columns + 1
        for index, row in enumerate(rows.tolist()):
            if (sampled := self.requests[row].sampled) is not None:
                sampled.append(SampledToken(int(tokens[index]), float(logprobs[index]), step))

    def _seen_tokens(
        self, rows: np.ndarray, sampling: Sampling, vocab_size: int
    ) -> BoolArray | None:
        if sampling.repetition_penalty == 1:
            return None
        seen = np.zeros((len(rows), vocab_size), np.bool_)
        for index, row in enumerate(rows):
            seen[index, self.requests[row].prompt_ids] = True
            seen[index, self.tokens[row, : self.num_tokens[row]]] = True
        return seen

    def _banned_tokens(self, rows: np.ndarray, vocab_size: int) -> BoolArray | None:
        """End tokens are banned in rows below min_tokens."""
        is_short = self.num_tokens[rows] < self._min_tokens[rows]
        if not is_short.any():
            return None
        banned = np.zeros((len(rows), vocab_size), np.bool_)
        banned[np.ix_(is_short, self._end_ids[self._end_ids < vocab_size])] = True
        return banned

    def newest(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest token of each running row and its position, [count] each."""
        last = self.num_tokens[: self.count] - 1
        return self.tokens[np.arange(self.count), last], self.num_prompt[: self.count] + last

    def ended(self) -> list[int]:
        """Rows whose completion has ended, in descending order, so that each can be removed."""
        tokens, _ = self.newest()
        ended = (tokens[:, None] == self._end_ids).any(1)
        ended |= (self.num_tokens == self.limits)[: self.count]
        for row in range(self.count):
            ended[row] |= self._has_stopped(row)
        return np.flatnonzero(ended)[::-1].tolist()

    def _has_stopped(self, row: int) -> bool:
        """Whether a completion of at least min_tokens has a stop string in its text."""
        stop = self.requests[row].sampling.stop
        length = self.num_tokens[row]
        if not stop or length < self._min_tokens[row]:
            return False
        text = models.text_of(self._tokenizer, self.tokens[row, :length])
        return any(string in text for string in stop)

    def completion(self, row: int, *, is_partial: bool = False) -> Completion:
        """The completion of a row so far.

        Its text is cut before the first stop string or the end token; its tokens are not cut.
        """
        request = self.requests[row]
        length = self.num_tokens[row]
        token_ids = self.tokens[row, :length].astype(np.int32)
        has_end = bool((token_ids[-1] == self._end_ids).any())
        text = models.text_of(
            self._tokenizer,
            token_ids[: length - has_end],
            skip_special_tokens=request.sampling.skip_special_tokens,
        )
        stops = [text.find(string) for string in request.sampling.stop if string in text]
        has_stopped = has_end or self._has_stopped(row)
        return Completion(
            index=request.index,
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            logprobs=self.logprobs[row, :length].copy(),
            policy_steps=self.steps[row, :length].copy(),
            finish_reason="stop" if has_stopped else "length",
            text=text[: min(stops, default=None)],
            has_end_token=has_end,
            is_partial=is_partial,
        )

    def find(self, ids: Collection[int]) -> list[int]:
        """Rows of the requests with these indices, in descending order, as for `ended`."""
        found = [row for row, request in enumerate(self.requests) if request.index in ids]
        return found[::-1]

    def remove(self, row: int) -> None:
        """Remove `row` by moving the last running row there."""
        self.count -= 1
        last = self.count
        tables = self.tokens, self.logprobs, self.steps, self._uniforms
        numbers = self.num_tokens, self.num_prompt, self.limits, self._min_tokens
        for array in (*tables, *numbers):
            array[row] = array[last]
        self.requests[row] = self.requests[last]
        self._options[row] = self._options[last]
        self.requests.pop()
        self._options.pop()

    def clear(self) -> None:
        self.count = 0
        self.requests.clear()
        self._options.clear()

    def length(self, row: int) -> int:
        return int(self.num_prompt[row] + self.num_tokens[row])
