"""Common to all engines: problems to requests, sampled tokens to completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.rollout import Answer, Completion, Problem, Request, Sampling, rollout_of

logger = logging.getLogger(__name__)


class CanGenerate(Protocol):
    """The part of registry.Engine that sampling needs."""

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield one completion per request, in any order."""
        ...


def generate_groups(
    engine: CanGenerate,
    tokenizer: models.Tokenizer,
    problems: Iterable[Problem | None],
    *,
    num_generations: int,
    sampling: Sampling,
    between_steps: Callable[[], None] | None = None,
) -> Iterator[tuple[Problem, list[Completion]]]:
    """Yield each problem with its `num_generations` completions as soon as all are complete.

    The next problem is read when the engine has a free slot; None among the problems means that
    none is available at the moment.
    """
    in_flight: dict[int, tuple[Problem, list[Completion]]] = {}  # by number of the problem

    def requests() -> Iterator[Request | None]:
        numbers = count()
        for problem in problems:
            if problem is None:
                yield None
                continue
            number = next(numbers)
            in_flight[number] = problem, []
            tokens = problem.input_token_ids or models.chat_prompt(tokenizer, problem.messages)
            prompt_ids = np.array(tokens, np.int32)
            for sibling in range(num_generations):
                yield Request(number * num_generations + sibling, prompt_ids)

    for completion in engine.generate(requests(), sampling, between_steps):
        number = completion.index // num_generations
        problem, siblings = in_flight[number]
        siblings.append(completion)
        if len(siblings) == num_generations:
            del in_flight[number]
            yield problem, sorted(siblings, key=lambda sibling: sibling.index)


def evaluate(
    engine: CanGenerate,
    tokenizer: models.Tokenizer,
    problems: Sequence[Problem],
    reward: Callable[[Problem, str], float | dict[str, float]],
    *,
    sampling: Sampling,
    num_generations: int = 1,
    reach: Callable[[int], None] = lambda num_done: None,
    between_steps: Callable[[], None] | None = None,
) -> list[tuple[Problem, list[Answer]]]:
    """`num_generations` scored answers to each problem, in the order of the problems.

    `reach` receives the number of completed problems. `between_steps` may cancel the engine: then
    only the problems completed so far are returned. A problem whose reward fails is skipped and
    logged; raises TaskError if the reward fails for all of them.
    """
    positions = {id(problem): position for position, problem in enumerate(problems)}
    answers: dict[int, list[Answer]] = {}
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
            answers[positions[id(problem)]] = [
                Answer(
                    problem.question,
                    completion.text,
                    rollout_of(completion, reward(problem, completion.text)).reward,
                )
                for completion in completions
            ]
        except TaskError as error:
            failure = error
            logger.warning("not evaluated: problem=%s reason=%s", problem.id, error)
        reach(num_done)
    if failure is not None and not answers:
        raise failure
    return [(problems[position], answers[position]) for position in sorted(answers)]


def read_requests(
    source: Iterator[Request | None], sampling: Sampling, *, limit: int, max_model_len: int
) -> tuple[list[Request], bool]:
    """Up to `limit` requests, fewer if none is available now, and whether more may follow.

    Raises ConfigError unless prompt and completion fit into `max_model_len` tokens.
    """
    batch: list[Request] = []
    for request in islice(source, limit):
        if request is None:
            return batch, True
        _check_lengths(len(request.prompt_ids), sampling.max_completion_length, max_model_len)
        batch.append(request)
    return batch, len(batch) == limit


def _check_lengths(num_prompt: int, num_new: int, max_model_len: int) -> None:
    if num_prompt == 0:
        raise ConfigError("a prompt has no token; check the chat template of the tokenizer")
    if num_new < 1:
        raise ConfigError(
            f"sampling.max_completion_length {num_new} leaves no room for a token; use 1 or more"
        )
    if num_prompt + num_new > max_model_len:
        raise ConfigError(
            f"a prompt of {num_prompt} tokens and sampling.max_completion_length {num_new} do not "
            f"fit into {max_model_len} tokens; raise engine.max_model_len to "
            f"{num_prompt + num_new} if the model allows it, or shorten one of them"
        )


def completion_of(
    tokenizer: models.Tokenizer,
    request: Request,
    sampling: Sampling,
    *,
    token_ids: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    policy_steps: NDArray[np.integer],
    ended: bool,
) -> Completion:
    """The completion of one request; its text ends before the first stop string.

    `ended` is true if the last of `token_ids` is an end token.
    """
    text = decode(tokenizer, token_ids)
    stop_at = find_stop(text, sampling.stop)
    return Completion(
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=token_ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        policy_steps=policy_steps.astype(np.int32),
        finish_reason="stop" if ended or stop_at is not None else "length",
        text=text[:stop_at],
    )


def decode(tokenizer: models.Tokenizer, token_ids: NDArray[np.integer]) -> str:
    """Generated text for rewards and stop strings: without special tokens."""
    return cast(str, tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Position of the first stop string in `text`, or None."""
    return min((text.find(string) for string in stop if string in text), default=None)


def end_token_ids(model: models.Model, tokenizer: models.Tokenizer) -> list[int]:
    """The tokens that end a completion."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    token_ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return [cast(int, token_id) for token_id in token_ids if token_id is not None]
