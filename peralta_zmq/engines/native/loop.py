"""The rows of one `generate`, and what a step does to them. Knows no source of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.native.cache import NOTHING
from peralta_zmq.engines.native.decoder import Decoder
from peralta_zmq.engines.native.prefix_cache import ROWS, Prompts
from peralta_zmq.engines.native.rows import Rows
from peralta_zmq.engines.native.sampler import draw
from peralta_zmq.engines.requests import completion_of, said, where_stopped
from peralta_zmq.errors import EngineError
from peralta_zmq.rollout import Completion, Request, Sampling


class Loop:
    """Starts rows, advances all of them together, and gives those that ended."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: models.Tokenizer,
        sampling: Sampling,
        end_ids: Sequence[int],
        slots: int,
    ) -> None:
        self._decoder, self._tokenizer, self._sampling = decoder, tokenizer, sampling
        self._end_ids = np.array(end_ids, np.int64)
        self._rows = Rows(slots, sampling)
        self._prompts = Prompts(decoder, first=slots)

    @property
    def num_running(self) -> int:
        """Completions under way."""
        return self._rows.count

    def forget_prompts(self) -> None:
        """The weights have changed: a new row must not start from the old ones' keys."""
        self._prompts.forget()

    @torch.inference_mode()
    def start(self, requests: Sequence[Request], *, step: int) -> None:
        """A row with its first token for each of `requests`."""
        if not requests:
            return
        first, logits = self._rows.count, list[Tensor]()
        for number, request in enumerate(requests):
            if not self._prompts.has(request.prompt_ids):
                self._prompts.compute(_first_prompts(requests[number:]))
            logits.append(self._prompts.hand_out(request.prompt_ids, self._rows.start(request)))
        self._sample(np.arange(first, self._rows.count), torch.stack(logits), step)

    @torch.inference_mode()
    def advance(self, *, step: int) -> None:
        """One more token for every row."""
        count = self._rows.count
        if not count:
            return
        tokens, places = (each[:, None] for each in self._rows.newest())
        hidden = self._decoder.hidden(tokens, places, first=0)
        self._sample(np.arange(count), self._decoder.logits(hidden[:, -1]), step)

    def take_ended(self) -> Iterator[Completion]:
        """The completions that ended in this step; their rows are free afterwards."""
        for row in self._ended():
            completion = self._completion(row)
            last = self._rows.remove(row)
            if last != row:
                self._decoder.cache.copy(last, row, self._rows.length(row))
            self._decoder.cache.spans[last] = NOTHING
            yield completion

    def _sample(self, rows: np.ndarray, logits: Tensor, step: int) -> None:
        chances = torch.from_numpy(self._rows.chances(rows)).to(logits.device)
        tokens, logprobs = draw(
            logits, self._sampling.at(step), chances,
            seen=self._seen(rows, logits), barred=self._barred(rows, logits),
        )  # fmt: skip
        taken = logprobs.cpu().numpy()
        if not np.isfinite(taken).all():
            self._decoder.cache.clear()
            raise EngineError(
                f"the weights of step {step} give logits that are not finite in "
                f"{int((~np.isfinite(taken)).sum())} of {len(rows)} completions; they are given up"
            )
        self._rows.add(rows, tokens.cpu().numpy(), taken, step=step)

    def _seen(self, rows: np.ndarray, logits: Tensor) -> Tensor | None:
        """[n, V], the tokens of prompt and completion so far; None when nobody asks."""
        if self._sampling.repetition_penalty == 1:
            return None
        seen = np.zeros(logits.shape, np.bool_)
        for number, row in enumerate(rows):
            seen[number, self._rows.requests[row].prompt_ids] = True
            seen[number, self._rows.tokens[row, : self._rows.num_tokens[row]]] = True
        return torch.from_numpy(seen).to(logits.device)

    def _barred(self, rows: np.ndarray, logits: Tensor) -> Tensor | None:
        """[n, V], the end tokens of rows that are too short to end; None when there are none."""
        short = self._rows.num_tokens[rows] < self._sampling.min_tokens
        if not short.any():
            return None
        barred = np.zeros(logits.shape, np.bool_)
        barred[np.ix_(short, self._end_ids)] = True
        return torch.from_numpy(barred).to(logits.device)

    def _ended(self) -> list[int]:
        """Rows whose newest token is their last, the highest first."""
        tokens, _ = self._rows.newest()
        ended = (tokens[:, None] == self._end_ids).any(1)
        ended |= (self._rows.num_tokens == self._rows.limits)[: self._rows.count]
        if self._sampling.stop:
            ended |= np.array([self._has_stopped(row) for row in range(self._rows.count)])
        return np.flatnonzero(ended)[::-1].tolist()

    def _has_stopped(self, row: int) -> bool:
        length = int(self._rows.num_tokens[row])
        if length < self._sampling.min_tokens:
            return False
        text = said(self._tokenizer, self._rows.tokens[row, :length])
        return where_stopped(text, self._sampling.stop) is not None

    def _completion(self, row: int) -> Completion:
        length = self._rows.num_tokens[row]
        return completion_of(
            self._tokenizer, self._rows.requests[row], self._sampling,
            token_ids=self._rows.tokens[row, :length],
            logprobs=self._rows.logprobs[row, :length],
            policy_steps=self._rows.steps[row, :length],
            ended=bool((self._rows.tokens[row, length - 1] == self._end_ids).any()),
        )  # fmt: skip


def _first_prompts(requests: Sequence[Request]) -> list[np.ndarray]:
    """The different prompts among the first requests, as many as are computed together."""
    found: dict[bytes, np.ndarray] = {}
    for request in requests:
        found.setdefault(request.prompt_ids.tobytes(), request.prompt_ids)
        if len(found) == ROWS:
            break
    return list(found.values())
