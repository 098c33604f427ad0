"""Sample from a model, or from the weights of a run, without a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from peralta_zmq import build
from peralta_zmq.config import Config
from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Completion, Message, Problem, Role, Sampling
from peralta_zmq.trainer.evaluate_model import open_target

Prompt: TypeAlias = "str | Sequence[Mapping[str, str]]"  # a question, or a list of messages


class Policy:
    """A model to sample from; made by `open_policy`. Use with `with`, or call `close`.

    `engine` is the registry.Engine that runs on this machine, and `tokenizer` that of the model.
    """

    def __init__(self, config: Config, run: Path | None, step: int | None) -> None:
        self._config = config
        self._num_calls = 0  # calls of `sample`
        with ExitStack() as stack:
            self.engine, self.tokenizer = open_target(config, run, step, stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        return self.engine.step

    def close(self) -> None:
        self._stack.close()

    def chat(self, messages: Prompt, **sampling: Any) -> str:
        """Answer a question or a list of messages, greedily unless `temperature` is given."""
        sampling = {"temperature": 0.0, **sampling}
        ((completion,),) = self.sample([messages], 1, **sampling)
        return completion.text

    def sample(
        self, prompts: Sequence[Prompt], n: int = 1, **sampling: Any
    ) -> list[list[Completion]]:
        """Sample `n` completions of each prompt, with their tokens and logprobs.

        `sampling` are fields of rollout.Sampling; the others are those of the run, or their
        defaults. Two calls sample different completions. Raises ConfigError for an unknown field.
        """
        defaults = build.make_sampling(self._config, seed=self._config.run.seed + self._num_calls)
        self._num_calls += 1
        try:
            chosen = replace(defaults, **sampling)
        except TypeError:
            known = ", ".join(Sampling.__dataclass_fields__)
            raise ConfigError(f"unknown in {', '.join(sampling)}; there are {known}") from None
        sampler = Sampler(self.engine, self.tokenizer)
        groups: list[RequestGroup] = []
        try:
            for prompt in prompts:
                groups.append(sampler.start(_problem_of(prompt), n, chosen))
            while sampler.num_in_flight:
                sampler.advance()
        except BaseException:  # the engine would keep what is in flight, for the next call
            sampler.drop(groups)
            raise
        return [group.completions for group in groups]


def _problem_of(prompt: Prompt) -> Problem:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chat = tuple(Message(cast("Role", each["role"]), each["content"]) for each in messages)
    return Problem("", "", chat, "")
