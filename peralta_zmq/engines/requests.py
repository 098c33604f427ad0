"""Code shared by the engines: requests, completions, LoRA adapters.

A request asks for one completion of a prompt. The requests for the same problem form a group, and
the completions of a group are siblings. The policy step of a token is the training step that
produced the weights with which the token was sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.models import lora
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Answer, Completion, Problem, Request, Sampling, rollout_of

logger = logging.getLogger(__name__)


# Problems to completions.


def generate_groups(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Iterable[Problem | None],
    *,
    num_generations: int,
    sampling: Sampling,
    between_steps: Callable[[], None] | None = None,
) -> Iterator[tuple[Problem, list[Completion]]]:
    """Yield each problem with its completions when all of its completions have ended.

    The next problem is read when the engine can start another completion. `problems` may yield None
    for "no problem is available now"; the engine then continues and reads again later. The engine
    calls `between_steps` between decode steps (one new token for every completion in flight);
    `between_steps` may apply newer weights or cancel the engine.
    """
    in_flight: dict[int, tuple[Problem, list[Completion]]] = {}  # by group number

    def requests() -> Iterator[Request | None]:
        group_numbers = count()
        for problem in problems:
            if problem is None:
                yield None
                continue
            group = next(group_numbers)
            in_flight[group] = problem, []
            tokens = problem.input_token_ids or models.chat_prompt(tokenizer, problem.messages)
            prompt_ids = np.array(tokens, np.int32)
            for sibling in range(num_generations):
                yield Request(group * num_generations + sibling, prompt_ids)

    for completion in engine.generate(requests(), sampling, between_steps):
        group = completion.index // num_generations
        problem, siblings = in_flight[group]
        siblings.append(completion)
        if len(siblings) == num_generations:
            del in_flight[group]
            yield problem, sorted(siblings, key=lambda sibling: sibling.index)


def evaluate(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Sequence[Problem],
    reward: Callable[[Problem, str], float | dict[str, float]],
    *,
    sampling: Sampling,
    num_generations: int = 1,
    report_progress: Callable[[int], None] = lambda num_done: None,
    between_steps: Callable[[], None] | None = None,
) -> list[tuple[Problem, list[Answer]]]:
    """Return each problem with its scored answers, in the order of `problems`.

    `report_progress` receives the number of completed problems. If the engine is cancelled
    (by `between_steps`), only the problems completed so far are returned. A problem is skipped and
    logged if the reward function fails for it. Raises TaskError if it fails for all problems.
    """
    answered: dict[int, list[Answer]] = {}  # id() of a problem -> its answers
    failure: TaskError | None = None
    groups = generate_groups(
        engine,
        tokenizer,
        problems,
        num_generations=num_generations,
        sampling=sampling,
        between_steps=between_steps,
    )
    for num_done, (problem, completions) in enumerate(groups, start=1):
        try:
            answered[id(problem)] = [
                Answer(
                    problem.question,
                    completion.text,
                    # `rollout_of` reduces a dict of rewards to one number.
                    rollout_of(completion, reward(problem, completion.text)).reward,
                )
                for completion in completions
            ]
        except TaskError as error:
            failure = error
            logger.warning("not evaluated: problem=%s reason=%s", problem.id, error)
        report_progress(num_done)
    if failure is not None and not answered:
        raise failure
    return [(problem, answered[id(problem)]) for problem in problems if id(problem) in answered]


# Helpers of the engines.


def read_requests(
    source: Iterator[Request | None], sampling: Sampling, *, limit: int, max_model_len: int
) -> tuple[list[Request], bool]:
    """Read requests until there are `limit`, or `source` yields None or ends.

    None means that no request is available now. Returns the requests, and True if `source` may
    yield more later. Raises ConfigError for an empty prompt, or if prompt and completion together
    do not fit into `max_model_len` tokens.
    """
    batch: list[Request] = []
    for request in islice(source, limit):
        if request is None:
            return batch, True
        num_prompt, num_new = len(request.prompt_ids), sampling.max_completion_length
        if num_prompt == 0:
            raise ConfigError("a prompt is empty; check the chat template of the tokenizer")
        if num_prompt + num_new > max_model_len:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens and sampling.max_completion_length {num_new} do "
                f"not fit into {max_model_len} tokens; raise engine.max_model_len to "
                f"{num_prompt + num_new} if the model allows it, or use shorter prompts or a "
                "smaller sampling.max_completion_length"
            )
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

    Its text is cut before the first stop string; its tokens are not cut. `ended` says whether the
    last token is an end token.
    """
    text = _decode(tokenizer, token_ids.tolist())
    stop_at = min((text.find(string) for string in sampling.stop if string in text), default=None)
    return Completion(
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=token_ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        policy_steps=policy_steps.astype(np.int32),
        finish_reason="stop" if ended or stop_at is not None else "length",
        text=text[:stop_at],
    )


def has_stop(tokenizer: models.Tokenizer, token_ids: list[int], stop: Sequence[str]) -> bool:
    """Whether the text of generated tokens contains one of the `stop` strings."""
    if not stop:
        return False
    text = _decode(tokenizer, token_ids)
    return any(string in text for string in stop)


def _decode(tokenizer: models.Tokenizer, token_ids: list[int]) -> str:
    """Text of generated tokens without special tokens, for rewards and stop strings."""
    return cast(str, tokenizer.decode(token_ids, skip_special_tokens=True))


def end_token_ids(model: models.Model, tokenizer: models.Tokenizer) -> list[int]:
    """The tokens that end a completion."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    token_ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return [cast(int, token_id) for token_id in token_ids if token_id is not None]


class LoraEngine:
    """Serves LoRA adapters by merging each adapter into the base weights.

    `base` is a separate copy of the base weights, because `engine` overwrites its own weights with
    merged ones, and every adapter is merged into the unchanged base.
    """

    def __init__(self, engine: Engine, base: Mapping[str, Tensor]) -> None:
        self._engine, self._base, self.step = engine, base, engine.step
        self.generate, self.cancel = engine.generate, engine.cancel

    def apply(
        self, weights: Mapping[str, Tensor], *, step: int, folder: Path | None = None
    ) -> None:
        """Merge the adapter `weights` into the base, and serve the result.

        Raises ValueError, with nothing changed, if the adapter belongs to another model.
        """
        # `folder` is not passed on: it has the files of the adapter, not of the merged weights.
        self._engine.apply(lora.MergedWeights(self._base, weights), step=step)
        self.step = step
