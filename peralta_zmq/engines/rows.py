"""Rows of a batch: the completions in progress, their ends, and their policy steps.

The engines that decode token by token keep a completion in progress in a row of their KV cache and
of `Rows`. The policy step of a token is the number of training steps of the weights that sampled
the token. An end token ends a completion, and so does the token that completes a stop string.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, EngineError
from peralta_zmq.rollout import BoolArray, Completion, Request, Sampling

GIB = 2**30
_decode = models.text_of  # text of generated tokens, for rewards and stop strings


def read_requests(
    source: Iterator[Request | None], sampling: Sampling, *, limit: int, max_model_len: int
) -> tuple[list[Request], bool]:
    """Read requests until there are `limit`, or `source` yields None or ends.

    None means that no request is available now. Returns the requests, and True if `source` may
    yield more later. Prompt and completion must fit into `max_model_len` tokens.
    """
    batch: list[Request] = []
    for request in islice(source, limit):
        if request is None:
            return batch, True
        own_sampling = request.sampling or sampling
        num_prompt, num_new = len(request.prompt_ids), own_sampling.max_completion_length
        num_new = min(num_new, request.max_completion_length or num_new)
        if own_sampling.fills_context:
            num_new = max(1, max_model_len - num_prompt)
            request = replace(request, max_completion_length=num_new)
        assert 0 < num_prompt <= max_model_len - num_new, (num_prompt, num_new, max_model_len)
        batch.append(request)
    return batch, len(batch) == limit  # fewer than the limit: `source` has ended


def completion_of(
    tokenizer: models.Tokenizer,
    request: Request,
    sampling: Sampling,
    *,
    token_ids: NDArray[np.integer],  # [T], the generated tokens
    logprobs: NDArray[np.floating],  # [T]
    policy_steps: NDArray[np.integer],  # [T]
    ended: bool,
) -> Completion:
    """Build the completion of one request.

    Its text is cut before the first stop string or the end token; its tokens are not cut. `ended`
    says whether the last token is an end token.
    """
    written = token_ids[:-1] if ended else token_ids
    has_stopped = ended or has_stop(tokenizer, written.tolist(), sampling.stop)
    text = _decode(tokenizer, written, skip_special_tokens=sampling.skip_special_tokens)
    stop_at = min((text.find(string) for string in sampling.stop if string in text), default=None)
    return Completion(
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=token_ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        policy_steps=policy_steps.astype(np.int32),
        finish_reason="stop" if has_stopped else "length",
        text=text[:stop_at],
        has_end_token=ended,
    )


def has_stop(tokenizer: models.Tokenizer, token_ids: list[int], stop: Sequence[str]) -> bool:
    """Whether the text of generated tokens contains one of the `stop` strings."""
    if not stop:
        return False
    text = _decode(tokenizer, token_ids)
    return any(string in text for string in stop)


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

    `row_bytes` is the size of one row of `max_model_len` tokens. An engine needs `rows_per_slot`
    rows for each slot, and `extra_rows` others.
    """
    needed = row_bytes * (slots * rows_per_slot + extra_rows)
    if needed > free_bytes:
        max_slots = int((free_bytes / row_bytes - extra_rows) / rows_per_slot)
        remedy = f"use engine.slots {max_slots} or " if max_slots > 0 else "use "
        raise ConfigError(
            f"engine.slots {slots} of engine.max_model_len {max_model_len} tokens need "
            f"{needed / GIB:.1f} GiB for keys and values, {free_bytes / GIB:.1f} GiB are free; "
            f"{remedy}a smaller engine.max_model_len"
        )


@lru_cache(maxsize=1024)  # for each row in each decode step
def _token_options(sampling: Sampling, step: int) -> Sampling:
    """The parameters with which `sample` samples a token with weights of policy step `step`."""
    return replace(
        sampling.at(step),
        min_tokens=0,
        max_completion_length=1,
        fills_context=False,
        stop=(),
        seed=0,
    )


class Rows:
    """The completions in progress as arrays with one entry per row.

    The first `count` rows are running, the remaining rows are free. `sampling` is for requests
    without parameters of their own.
    """

    def __init__(
        self,
        num_rows: int,
        tokenizer: models.Tokenizer,
        sampling: Sampling,
        end_ids: Sequence[int],
        *,
        max_model_len: int,
    ) -> None:
        shape = (num_rows, max_model_len)
        self._tokenizer, self._sampling = tokenizer, sampling
        self._end_ids = np.array(end_ids, np.int64)
        self.count = 0
        self.requests: list[Request] = []
        self.tokens = np.zeros(shape, np.int64)  # generated tokens
        self.logprobs = np.zeros(shape, np.float32)
        self.steps = np.zeros(shape, np.int32)  # policy step of each token
        self.num_tokens = np.zeros(num_rows, np.int64)  # number of tokens generated so far
        self.num_prompt = np.zeros(num_rows, np.int64)  # length of the prompt
        self.limits = np.zeros(num_rows, np.int64)  # maximum of num_tokens
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._is_cancelled = np.zeros(num_rows, np.bool_)  # Request.on_token has returned False
        # Whether the request has its own sampling parameters, stop strings, or on_token: with many
        # rows, a loop over all of them in each decode step would take long.
        self._has_sampling = np.zeros(num_rows, np.bool_)
        self._has_stop = np.zeros(num_rows, np.bool_)
        self._has_on_token = np.zeros(num_rows, np.bool_)
        self._uniforms = np.zeros(shape, np.float32)  # random numbers for sampling, one per token

    def start(self, request: Request) -> int:
        """Put `request` into the next free row; returns the row.

        The random number of a token depends only on its position, the seed and, unless the request
        is standalone, its index.
        """
        sampling = self._sampling_of(request)
        row, self.count = self.count, self.count + 1
        self.requests.append(request)
        self.num_tokens[row], self.num_prompt[row] = 0, len(request.prompt_ids)
        limit, max_length = request.max_completion_length, sampling.max_completion_length
        self.limits[row] = limit = max_length if limit is None else min(limit, max_length)
        self._min_tokens[row], self._is_cancelled[row] = sampling.min_tokens, False
        self._has_sampling[row] = request.sampling is not None
        self._has_stop[row] = bool(sampling.stop)
        self._has_on_token[row] = request.on_token is not None
        key = [sampling.seed, 0 if request.is_standalone else request.index]
        generator = np.random.Generator(np.random.Philox(key=key))
        self._uniforms[row, :limit] = generator.random(limit, dtype=np.float32)
        if (resumed := request.resumes) is not None:
            self.num_tokens[row] = length = len(resumed.token_ids)
            self.tokens[row, :length] = resumed.token_ids
            self.logprobs[row, :length] = resumed.logprobs
            self.steps[row, :length] = resumed.policy_steps
        return row

    def by_sampling(
        self, rows: np.ndarray, step: int
    ) -> Iterator[tuple[Sampling, np.ndarray | slice]]:
        """Divide `rows` by the parameters with which their next token is sampled.

        Yields parameters for weights of policy step `step`, with the indices in `rows` of the rows
        that have them. Rows that differ only in seeds, limits or stop strings are not divided.
        """
        has_sampling = self._has_sampling[rows]
        divided = {_token_options(self._sampling, step): np.flatnonzero(~has_sampling).tolist()}
        for index in np.flatnonzero(has_sampling).tolist():
            options = _token_options(self._sampling_of(self.requests[rows[index]]), step)
            divided.setdefault(options, []).append(index)
        for options, indices in divided.items():
            if len(indices) == len(rows):
                yield options, slice(None)  # no copy of the logits
            elif indices:
                yield options, np.array(indices)

    def _sampling_of(self, request: Request) -> Sampling:
        return request.sampling or self._sampling

    def next_uniforms(self, rows: np.ndarray) -> np.ndarray:
        """A random number in [0, 1) for the next token of each of `rows`."""
        return self._uniforms[rows, self.num_tokens[rows]]

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, *, step: int
    ) -> None:
        """Add one token to each of `rows`, sampled by the weights of policy step `step`.

        Raises EngineError, with nothing added, if a logprob is not finite.
        """
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
        for index in np.flatnonzero(self._has_on_token[rows]).tolist():
            on_token = self.requests[rows[index]].on_token
            assert on_token is not None
            is_wanted = on_token(int(tokens[index]), float(logprobs[index]), step)
            self._is_cancelled[rows[index]] = not is_wanted

    def seen_tokens(
        self, rows: np.ndarray, sampling: Sampling, vocab_size: int
    ) -> BoolArray | None:
        """[n, V], True: the repetition penalty applies; None if `sampling` has none."""
        if sampling.repetition_penalty == 1:
            return None
        seen = np.zeros((len(rows), vocab_size), np.bool_)
        for index, row in enumerate(rows):
            seen[index, self.requests[row].prompt_ids] = True
            seen[index, self.tokens[row, : self.num_tokens[row]]] = True
        return seen

    def banned_tokens(self, rows: np.ndarray, vocab_size: int) -> BoolArray | None:
        """[n, V], True for end tokens in rows below min_tokens; None without such rows."""
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
        """Rows whose completion has ended, in descending order.

        `remove` moves the last row into the place of the removed row. The descending order ensures
        that the moved row is still running.
        """
        tokens, _ = self.newest()
        ended = (tokens[:, None] == self._end_ids).any(1)
        ended |= (self.num_tokens == self.limits)[: self.count]
        ended |= self._is_cancelled[: self.count]
        for row in np.flatnonzero(self._has_stop[: self.count]).tolist():
            ended[row] |= self._has_stopped(row)
        return np.flatnonzero(ended)[::-1].tolist()

    def _has_stopped(self, row: int) -> bool:
        """Whether a row has at least min_tokens tokens and contains a stop string."""
        stop, length = self._sampling_of(self.requests[row]).stop, int(self.num_tokens[row])
        if not stop or length < self._min_tokens[row]:
            return False
        return has_stop(self._tokenizer, self.tokens[row, :length].tolist(), stop)

    def completion(self, row: int) -> Completion:
        """The completion of a row."""
        length = self.num_tokens[row]
        return completion_of(
            self._tokenizer,
            self.requests[row],
            self._sampling_of(self.requests[row]),
            token_ids=self.tokens[row, :length],
            logprobs=self.logprobs[row, :length],
            policy_steps=self.steps[row, :length],
            ended=bool((self.tokens[row, length - 1] == self._end_ids).any()),
        )

    def partial_completions(self) -> Iterator[Completion]:
        """The completions of the running rows as they are."""
        for row in range(self.count):
            yield replace(self.completion(row), is_partial=True)

    def remove(self, row: int) -> int:
        """Remove `row`, move the last running row there, return that row's old index."""
        self.count -= 1
        last = self.count
        tables = self.tokens, self.logprobs, self.steps, self._uniforms
        numbers = self.num_tokens, self.num_prompt, self.limits, self._min_tokens
        flags = self._is_cancelled, self._has_sampling, self._has_stop, self._has_on_token
        for array in (*tables, *numbers, *flags):
            array[row] = array[last]
        self.requests[row] = self.requests[last]
        self.requests.pop()
        return last

    def length(self, row: int) -> int:
        """Number of tokens of prompt and completion."""
        return int(self.num_prompt[row] + self.num_tokens[row])
