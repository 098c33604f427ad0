"""Requests into rows, one token per running row and step, completions out.

A row that ends is filled again at the next step. Between two steps the caller may apply newer
weights: running rows keep their keys and values and go on, and each token names its weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native import prefix_cache
from peralta_zmq.engines.native.decoder import Decoder, serves
from peralta_zmq.engines.native.loop import Loop
from peralta_zmq.engines.native.memory import check_room
from peralta_zmq.engines.requests import check_request, check_sampling, end_ids
from peralta_zmq.rollout import Completion, Request, Sampling

logger = logging.getLogger(__name__)


def open_engine(
    model: models.Model,
    tokenizer: models.Tokenizer,
    *,
    step: int = 0,
    slots: int = 32,
    max_model_len: int = 512,
    live: bool = False,
) -> NativeEngine | HfEngine:
    """The native engine, or transformers' where it does not know the architecture."""
    engine = NativeEngine if serves(model) else HfEngine
    if engine is HfEngine:
        kind = model.config.model_type
        logger.info("engine native does not know %s: transformers' generate samples instead", kind)
    return engine(
        model, tokenizer, step=step, slots=slots, max_model_len=max_model_len, live=live
    )  # fmt: skip


class NativeEngine:
    """`slots` sequences of at most `max_model_len` tokens that are sampled together.

    With `live` the model is a trainer's: its weights are used as they are at each `generate`, and
    no memory is held in between. Without, the engine packs the weights and the model is its own.
    Raises ConfigError when the keys and values do not fit in memory.
    """

    def __init__(
        self,
        model: models.Model,
        tokenizer: models.Tokenizer,
        *,
        step: int = 0,
        slots: int = 32,
        max_model_len: int = 512,
        live: bool = False,
    ) -> None:
        self.step = step
        self._model, self._tokenizer, self._live = model, tokenizer, live
        self._slots = slots
        self._capacity = min(max_model_len, model.config.max_position_embeddings)
        self._end_ids = end_ids(model, tokenizer)
        self._cancelled = False
        self._loop: Loop | None = None
        check_room(model, slots=slots, extra_rows=prefix_cache.ROWS + 1, capacity=self._capacity)
        self._decoder = None if live else self._new_decoder()

    def apply(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Sample from `weights` from the next token on. Raises ValueError, with nothing changed,
        if they are of another model."""
        if self._decoder is None:
            models.apply_weights(self._model, weights)
        else:
            self._decoder.apply(weights)
        if self._loop is not None:
            self._loop.forget_prompts()
        self.step = step

    def cancel(self) -> None:
        """Give up what is under way: `generate` ends at its next step."""
        self._cancelled = True

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Each completion when it ends. Requests are taken as rows become free; None among them
        says that there is nothing to start right now.

        Raises ConfigError for a request that cannot be met, EngineError for logits that are not
        finite; what is under way is then lost.
        """
        check_sampling(sampling)
        self._cancelled = False
        decoder = self._decoder or self._new_decoder()
        self._loop = loop = Loop(decoder, self._tokenizer, sampling, self._end_ids, self._slots)
        source, more = iter(requests), True
        try:
            while not self._cancelled and (more or loop.num_running):
                if more:
                    taken, more = self._take(source, sampling, room=self._slots - loop.num_running)
                    loop.start(taken, step=self.step)
                    yield from loop.take_ended()
                loop.advance(step=self.step)
                yield from loop.take_ended()
                if between_steps is not None:
                    between_steps()
        finally:
            if self._loop is loop:  # a live engine gives its room back
                self._loop = None

    def _new_decoder(self) -> Decoder:
        return Decoder(
            self._model,
            num_rows=self._slots + prefix_cache.ROWS,
            capacity=self._capacity,
            live=self._live,
        )

    def _take(
        self, source: Iterator[Request | None], sampling: Sampling, *, room: int
    ) -> tuple[list[Request], bool]:
        """Requests for the free rows, and whether more may come."""
        taken: list[Request] = []
        for request in islice(source, room):
            if request is None:
                return taken, True
            check_request(request, sampling, self._capacity)
            taken.append(request)
        return taken, len(taken) == room
