"""Adapter: the data sets of the library reasoning-gym as tasks (`reasoning_gym:chain_sum`).

The library generates item i of a data set from the seed `seed + i`, and scores an answer with the
item. A problem carries in `info` what a reward worker needs to generate its item again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from peralta_zmq.environments.dataset import problem_id, unknown_option
from peralta_zmq.errors import ConfigError, choices_text, import_extra
from peralta_zmq.rollout import Message, Problem

PREFIX = "reasoning_gym"
# Imported with this module, because the import takes longer than many a reward may take.
_library = import_extra(PREFIX, extra="reasoning-gym", needed_by=f"task {PREFIX}:NAME")
# The held-out items are generated from other seeds than those of any train set.
EVAL_SEED_OFFSET = 1 << 30
MAX_SIZE = 1 << 20
OWN_OPTIONS = ("size", "eval_size", "system_prompt", "answer_tag")  # those of this adapter
# Data sets whose own answers, if any, do not earn the full reward, or that need other data sets.
UNUSABLE = {
    "boxnet": "its items have no answer",
    "composite": "it needs a list of other data sets; use several environments instead",
    "graph_color": "its items have no answer",
    "knight_swap": "its own answers do not always earn 1",
    "list_functions": "its items do not depend on the seed alone",
    "propositional_logic": "its items have no answer",
    "rubiks_cube": "its items have no answer",
    "rush_hour": "its items have no answer",
}


class ReasoningGymTask:
    """The task of one data set. Raises ConfigError for a name that cannot be used."""

    def __init__(self, name: str) -> None:
        names = sorted(set(_datasets()) - set(UNUSABLE))
        if name in UNUSABLE:
            raise ConfigError(f"task {PREFIX}:{name} cannot be used: {UNUSABLE[name]}")
        if name not in names:
            choices = choices_text("choose one of", name, names, f"{PREFIX}:{{}}")
            raise ConfigError(f"unknown task {PREFIX}:{name}; {choices}")
        self._name = name
        self.reward = reward

    def problems(
        self,
        split: str,
        seed: int,
        *,
        size: int = 1000,
        eval_size: int = 100,
        system_prompt: str | None = None,
        answer_tag: str = "answer",
        **config: Any,
    ) -> Iterator[Problem]:
        """The items of a split; `config` has options of the data set.

        The answer is the text in the last element <answer_tag> of a completion; with an empty
        `answer_tag`, the whole completion. The default of `system_prompt` asks for the element.
        Raises ConfigError for an unknown option.
        """
        if answer_tag and system_prompt is None:
            system_prompt = (
                "Think about the question, then write only the final answer as "
                f"<{answer_tag}>ANSWER</{answer_tag}>."
            )
        system = (Message("system", system_prompt),) if system_prompt else ()
        count = size if split == "train" else eval_size
        if not 0 < count <= MAX_SIZE:
            raise ConfigError(f"{count} items of {PREFIX}:{self._name}; use 1 to {MAX_SIZE}")
        _check_config(self._name, config)
        item_seed = seed + (0 if split == "train" else EVAL_SEED_OFFSET)
        source = json.dumps(
            {"name": self._name, "seed": item_seed, "size": count, **config}, sort_keys=True
        )
        for index in range(count):
            item = dataset_of(source)[index]
            question = str(item["question"])
            yield Problem(
                problem_id((self._name, str(item_seed + index), question)),
                self._name,
                (*system, Message("user", question)),
                answer=str(item["answer"]),
                info={"source": source, "index": index, "answer_tag": answer_tag},
            )


def reward(problem: Problem, completion_text: str) -> float:
    """The score that the data set gives to the answer in a completion, from 0 to 1."""
    info = problem.info
    dataset = dataset_of(info["source"])
    answer: str | None = completion_text.strip()
    if tag := info["answer_tag"]:
        answer = _library.utils.extract_answer(completion_text, tag_name=tag)
    return float(dataset.score_answer(answer=answer, entry=item_of(info["source"], info["index"])))


@functools.lru_cache(maxsize=64)
def dataset_of(source: str) -> Any:
    return _library.create_dataset(**json.loads(source))


@functools.lru_cache(maxsize=1024)
def item_of(source: str, index: int) -> Any:
    return dataset_of(source)[index]


def _datasets() -> dict[str, Any]:
    factory: Any = _library.factory
    return factory.DATASETS


def _check_config(name: str, config: dict[str, Any]) -> None:
    make_config: Callable[..., Any] = _datasets()[name][1]
    options = [each.name for each in dataclasses.fields(make_config)]  # type: ignore[arg-type]
    options = [*OWN_OPTIONS, *(each for each in options if each not in ("seed", "size"))]
    for option in config:
        if option not in options:
            raise unknown_option(f"task {PREFIX}:{name}", option, options)
    try:
        made = make_config(seed=0, size=1, **config)
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"task {PREFIX}:{name} refuses its options {config}: {reason}; correct data.args"
        ) from None
