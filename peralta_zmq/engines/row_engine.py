"""Engine that samples one token per row and decode step, over a decoder of native, hf or mlx.

A row holds one completion in progress. When it ends, another request takes the row at a later step.
Running rows keep their keys and values when newer weights are applied between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from peralta_zmq import models
from peralta_zmq.engines.engine_models import AdapterMerger
from peralta_zmq.errors import ConfigError, EngineError
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import BoolArray, Completion, Request, SampledToken, Sampling


class SamplingInputs(NamedTuple):
    """Inputs of the token sampler besides the logits, for n rows with equal options."""

    sampling: Sampling
    uniforms: np.ndarray  # [n], random numbers in [0, 1)
    seen: BoolArray | None = None  # [n, V], True: the repetition penalty applies
    banned: BoolArray | None = None  # [n, V], True: must not be sampled


class RowDecoder(Protocol):
    """Computes logits [n, V], arrays of its own library, and keeps the keys and values of rows."""

    def start(self, requests: Sequence[Request], first_row: int) -> tuple[list[Request], Any]:
        """Fill the rows from `first_row` on with prefixes of requests, one per row.

        Returns the requests that were started, in the order of their rows, and the logits of their
        next tokens. All others wait, and are passed again.
        """
        ...

    def decode(self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]) -> Any:
        """Add a token to each of the first n rows, [n] each; returns the next logits."""

    def sample(
        self, logits: Any, part: np.ndarray | slice, inputs: SamplingInputs
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logprobs sampled from the logits of `part`: see native/token_sampler.py."""
        ...

    def keep(self, request: Request, row: int, length: int) -> None:
        """The completion of `request` has ended; `length` tokens of its row are computed."""

    def remove(self, row: int, last: int, last_length: int) -> None:
        """Free `row` by moving row `last` there, which has `last_length` tokens."""

    def reset(self, *, is_damaged: bool = False) -> None:
        """No row is in use. If `is_damaged`, keys and values may be not finite: drop them."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights. Raises ValueError, with nothing changed, if they do not fit."""


class RowEngine:
    """Samples a completion in each of `rows`; implements registry.Engine."""

    def __init__(
        self, decoder: RowDecoder, rows: Rows, *, step: int = 0, merger: AdapterMerger | None = None
    ) -> None:
        self.step = step
        self.max_model_len = rows.max_model_len
        self._decoder = decoder
        self._rows = rows
        self._merger = merger
        self._waiting: list[Request] = []

    def num_free(self) -> int:
        return self._rows.num_rows - self._rows.count - len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    @torch.inference_mode()
    def advance(self) -> list[Completion]:
        if self.num_free() == self._rows.num_rows:
            return []
        try:
            self._start()
            completions = self._pop_ended()
            if self._rows.count or self._waiting:
                logits = self._decoder.decode(*self._rows.newest(), self._waiting)
                if self._rows.count:
                    self._sample(0, logits)
                self._start()
        except Exception:
            self._rows.clear()
            self._waiting = []
            self._decoder.reset(is_damaged=True)
            raise
        completions += self._pop_ended()
        self._reset_if_idle()
        return completions

    def drop(self, ids: Collection[int]) -> list[Completion]:
        self._waiting = [request for request in self._waiting if request.index not in ids]
        rows = self._rows.find(ids)
        completions = [self._rows.completion(row) for row in rows]
        for row in rows:
            self._remove(row)
        self._reset_if_idle()
        return completions

    def apply(self, update: WeightUpdate) -> None:
        self._decoder.load(self._merger.weights_of(update) if self._merger else update.tensors)
        self.step = update.step

    def _start(self) -> None:
        if not self._waiting:
            return
        first_row = self._rows.count
        started, logits = self._decoder.start(self._waiting, first_row)
        is_started = {request.index for request in started}
        self._waiting = [each for each in self._waiting if each.index not in is_started]
        for request in started:
            self._rows.start(request)
        if started:
            self._sample(first_row, logits)

    def _sample(self, first_row: int, logits: Any) -> None:
        rows = np.arange(first_row, self._rows.count)
        tokens = np.empty(len(rows), np.int64)
        logprobs = np.empty(len(rows), np.float32)
        for part, inputs in self._rows.sampling_inputs(first_row, logits.shape[-1]):
            tokens[part], logprobs[part] = self._decoder.sample(logits, part, inputs)
        self._rows.append(rows, tokens, logprobs, step=self.step)

    def _pop_ended(self) -> list[Completion]:
        ended = self._rows.ended()
        completions = [self._rows.completion(row) for row in ended]
        for row in ended:
            # The keys and values of the last token are not computed.
            self._decoder.keep(self._rows.requests[row], row, self._rows.length(row) - 1)
            self._remove(row)
        return completions

    def _reset_if_idle(self) -> None:
        if self.num_free() == self._rows.num_rows:
            self._decoder.reset()

    def _remove(self, row: int) -> None:
        last = self._rows.count - 1
        self._decoder.remove(row, last, self._rows.length(last))
        self._rows.remove(row)


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
        rows = np.arange(first_row, self.count)
        divided: dict[Sampling, list[int]] = {}
        for index, request in enumerate(self.requests[first_row:]):
            divided.setdefault(_token_options(request.sampling), []).append(index)
        for sampling, indices in divided.items():
            # A slice makes no copy of the logits.
            part = slice(None) if len(divided) == 1 else np.array(indices)
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
        stop = self.requests[row].sampling.stop
        length = self.num_tokens[row]
        if not stop or length < self._min_tokens[row]:
            return False
        text = models.text_of(self._tokenizer, self.tokens[row, :length])
        return any(string in text for string in stop)

    def completion(self, row: int) -> Completion:
        """The completion of a row so far, with its text cut before a stop string or end token."""
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
        self.requests.pop()

    def clear(self) -> None:
        self.count = 0
        self.requests.clear()

    def length(self, row: int) -> int:
        return int(self.num_prompt[row] + self.num_tokens[row])


@lru_cache(maxsize=1024)
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
    """Raise ConfigError if rows of `row_bytes` each do not fit into the free memory."""
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
