"""The problems of a run: its environments, each a task with a data set."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

from peralta_zmq.environments.data_files import TOKENS_COLUMN, Record, read_records
from peralta_zmq.environments.reward_pool import RewardPool
from peralta_zmq.environments.turns import Reply
from peralta_zmq.errors import ConfigError, TaskError, choices_text
from peralta_zmq.rollout import Completion, Message, Problem, Role, Score
from peralta_zmq.signatures import Signature, call_error

Split: TypeAlias = Literal["train", "eval"]
Parsed = TypeVar("Parsed")
INFO_COLUMN = "info"
logger = logging.getLogger(__name__)


class Functions(Protocol):
    """Rewards and replies of an environment.

    `identity` is equal for equal functions, `has_room` is False while too many completions wait.
    A method's future has a RewardError if a function failed, and a TaskError if no result can be
    computed at all.
    """

    @property
    def identity(self) -> str: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def has_turns(self) -> bool: ...

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Those of the tools."""
        ...

    def score(
        self,
        problem: Problem,
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),
    ) -> Future[list[Score]]:
        """The scores of completions, in order.

        `messages` are those after the prompt, of a problem with several turns.
        """
        ...

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Reply]:
        """The messages that follow a completion, the last of `messages`; None ends the episode."""
        ...

    def close(self) -> None: ...


class Agents(Protocol):
    """The agents of an environment, which give rewards and ask for turns themselves."""

    @property
    def has_room(self) -> bool: ...

    def run(self, problem: Problem, *, base_url: str, api_key: str) -> Future[Score]:
        """Run an agent, which sends its requests to an OpenAI-compatible address."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Environments:
    """Problems and functions of all environments. Use with `closing`."""

    sizes: Mapping[str, int]  # number of problems by label of the environment
    problems: tuple[Problem, ...]  # grouped by environment, in the order of `sizes`
    functions: Mapping[str, Functions]  # by label, which is the `task` of its problems
    pool: RewardPool  # of the functions on this machine
    agents: Mapping[str, Agents] = field(default_factory=dict[str, Agents])  # by label

    @property
    def has_room(self) -> bool:
        return all(each.has_room for each in (*self.functions.values(), *self.agents.values()))

    def score(self, problem: Problem, completions: Sequence[Completion]) -> Future[list[Score]]:
        known: Future[list[Score]] = Future()
        for completion in completions:
            if completion.error is not None:
                known.set_exception(completion.error)
                return known
        scores = [completion.score for completion in completions if completion.score is not None]
        if len(scores) == len(completions):  # given by an agent
            known.set_result(scores)
            return known
        texts = [completion.text for completion in completions]
        token_ids = [completion.token_ids.tolist() for completion in completions]
        messages = [each.messages for each in completions] if self.has_turns(problem) else ()
        return self.functions[problem.task].score(problem, texts, token_ids, messages)

    def reward(self, problem: Problem, text: str) -> float:
        """The reward of a completion without token ids. Raises RewardError or TaskError."""
        (score,) = self.functions[problem.task].score(problem, [text], [()]).result()
        return score.reward

    def has_turns(self, problem: Problem) -> bool:
        functions = self.functions.get(problem.task)  # None: it has an agent
        return functions is not None and functions.has_turns

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Reply]:
        return self.functions[problem.task].reply(problem, messages)

    def has_agent(self, problem: Problem) -> bool:
        return problem.task in self.agents

    def run_agent(self, problem: Problem, *, base_url: str, api_key: str) -> Future[Score]:
        return self.agents[problem.task].run(problem, base_url=base_url, api_key=api_key)

    def close(self) -> None:
        for each in (*self.functions.values(), *self.agents.values()):
            each.close()

    @property
    def digest(self) -> bytes:
        """8 bytes that identify the problems and their order."""
        ids = "\n".join(problem.id for problem in self.problems)
        return hashlib.sha256(ids.encode()).digest()[:8]


def load_problems(
    problems: Callable[..., Iterator[Problem]],
    split: str,
    *,
    seed: int,
    options: Mapping[str, Any],
    wrap: Callable[[Iterator[Problem]], Iterator[Problem]] = iter,
) -> list[Problem]:
    """All problems that the function `problems` of a task returns; `wrap` may show the progress.

    Raises ConfigError for an option that the task does not have, and TaskError if the split is
    empty or has a message that is not text.
    """
    signature = Signature(problems, 2)
    for option in options:
        if not signature.accepts(option):
            raise unknown_option(
                "options in [data] do not fit the task: it", option, signature.names
            )
    if error := call_error(problems, split, seed, **options):
        raise ConfigError(f"options in [data] do not fit the task: {error}; correct them")
    loaded = list(wrap(problems(split, seed, **options)))
    if not loaded:
        raise TaskError(f"the task has no problems for '{split}'; choose a data set in [data]")
    numbered = [
        replace(problem, row=problem.row or row) for row, problem in enumerate(loaded, start=1)
    ]
    for problem in numbered:
        _check_text(problem, split)
    return numbered


def _check_text(problem: Problem, split: str) -> None:
    for text in (problem.id, problem.answer, *(each.content for each in problem.messages)):
        try:
            str.encode(text)
        except (TypeError, UnicodeEncodeError):
            raise TaskError(
                f"row {problem.row} of the problems for '{split}' has {text!a:.60} as text; "
                "prompts and answers must be valid text, without images or other parts"
            ) from None


def unknown_option(owner: str, option: str, names: Sequence[str]) -> ConfigError:
    """The error for an option that `owner`, a task, does not have; `names` are its options."""
    choices = choices_text("its options are", option, names or ["none"])
    return ConfigError(f"{owner} has no option '{option}'; {choices} (data.args or env.args)")


def problem_id(values: Sequence[str]) -> str:
    """16 hexadecimal digits of the SHA-256 of the texts that identify a problem."""
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]


def labeled_problem(problem: Problem, label: str) -> Problem:
    """The problem with its environment's `label` as task, and an id that equal problems share.

    Equal ones have one prompt and one answer; without an answer, one id and `info`.
    """
    contents = [message.content for message in problem.messages if message.role != "system"]
    prompt = "\n".join(contents) or problem.question
    own = json.dumps([problem.id, problem.info], sort_keys=True, default=repr)
    return replace(problem, task=label, id=problem_id([label, prompt, problem.answer or own]))


# The problems of a file.


def problems_from_files(
    task: str,
    *,
    train: str,
    eval: str,
    check: Callable[[str], object],
    prompt_column: str = "prompt",
    answer_column: str = "answer",
) -> Callable[..., Iterator[Problem]]:
    """The function `problems` of a task whose problems are the records of a file.

    `train`, `eval` and the columns are defaults of settings in [data]; `check` as in
    `read_problems`.
    """

    def problems(
        split: Split,
        seed: int,
        *,
        train: str = train,
        eval: str = eval,
        prompt_column: str = prompt_column,
        answer_column: str = answer_column,
        system_prompt: str = "",
    ) -> Iterator[Problem]:
        return read_problems(
            train if split == "train" else eval,
            task,
            prompt_column=prompt_column,
            answer_column=answer_column,
            system_prompt=system_prompt,
            check=check,
        )

    return problems


def read_problems(
    source: str,
    task: str,
    *,
    prompt_column: str,
    answer_column: str,
    system_prompt: str = "",
    check: Callable[[str], object] = str,
) -> Iterator[Problem]:
    """The problems of a data set, as `usable_problems`.

    The column `info` may hold an object for the reward functions: in CSV, and in a text of Parquet,
    as JSON. `check` raises ValueError for an unusable answer. Raises TaskError for a file that
    cannot be read, and for a missing column.
    """

    def problem_of(record: Record) -> Problem:
        problem = problem_of_record(record, task, prompt_column, system_prompt)
        if answer_column not in record.values:
            raise record.missing_column(answer_column, setting="data.answer_column")
        answer = record.text(answer_column)
        try:
            check(answer)
        except ValueError as reason:
            raise ValueError(f"answer {answer!r:.80}: {reason}") from None
        return replace(problem, answer=answer, info=_info(record))

    return usable_problems(read_records(source), problem_of)


def usable_problems(
    records: Sequence[Record], problem_of: Callable[[Record], Problem]
) -> Iterator[Problem]:
    """Iterator over the problems of records, with the number of unread ones as length hint.

    A record for which `problem_of` raises ValueError is skipped and logged at the end, or causes a
    TaskError if none is usable.
    """
    unread = iter(records)
    return _Problems(_usable_problems(unread, problem_of), unread)


def parsed_answer(problem: Problem, parse: Callable[[str], Parsed]) -> Parsed:
    """`parse(problem.answer)`; converts a ValueError of `parse` to TaskError."""
    try:
        return parse(problem.answer)
    except ValueError as reason:
        raise TaskError(
            f"problem {problem.id} has the unusable answer {problem.answer!r:.80} ({reason}); "
            "correct the data set"
        ) from None


class _Problems:
    def __init__(self, problems: Iterator[Problem], unread: Iterator[Record]) -> None:
        self._problems = problems
        self._unread = unread

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        return next(self._problems)

    def __length_hint__(self) -> int:
        return length_hint(self._unread)


def _usable_problems(
    records: Iterator[Record], problem_of: Callable[[Record], Problem]
) -> Iterator[Problem]:
    num_kept = 0
    refused: list[str] = []
    source = ""
    for record in records:
        source = record.source
        try:
            problem = problem_of(record)
        except ValueError as reason:
            refused.append(f"row={record.line_number} reason='{reason}'")
        else:
            num_kept += 1
            yield problem
    if not num_kept:
        raise TaskError(
            f"none of the {len(refused)} rows of '{source}' can be used, the first is "
            f"{refused[0]}; name the right columns or correct the file"
        )
    for line in refused:
        logger.warning("event=row_refused source='%s' %s", source, line)
    if refused:
        logger.warning(
            "event=rows_refused source='%s' refused=%d kept=%d", source, len(refused), num_kept
        )


def problem_of_record(record: Record, task: str, prompt_column: str, system_prompt: str) -> Problem:
    """The problem of a record without its answer: the prompt is a text, a chat, or token ids.

    Raises TaskError for a column that is missing or has other values, and ValueError for an empty
    prompt or invalid token ids.
    """
    prompts = [column for column in (prompt_column, TOKENS_COLUMN) if column in record.values]
    if not prompts:
        raise record.missing_column(prompt_column, setting="data.prompt_column")
    chat = record.values.get(prompt_column)
    messages = _messages(cast("list[Any]", chat), record) if isinstance(chat, list) else ()
    if messages:
        prompts.remove(prompt_column)
    texts = {column: record.text(column) for column in prompts}
    prompt = texts.get(prompt_column, "")
    words = texts.get(TOKENS_COLUMN, "").split()
    largest = 2**31 - 1  # token ids are stored as int32
    if not all(word.isascii() and word.isdigit() and int(word) <= largest for word in words):
        raise ValueError(f"{TOKENS_COLUMN} must be integers from 0 to {largest}")
    contents = [message.content for message in messages] or [prompt or texts.get(TOKENS_COLUMN, "")]
    if prompt:
        messages = (Message("user", prompt),)
    if not words and not any(message.content.strip() for message in messages):
        raise ValueError("the prompt is empty")
    if system_prompt and not words and next(iter(messages)).role != "system":
        messages = (Message("system", system_prompt), *messages)
    return Problem(
        id=problem_id((task, *contents)),
        task=task,
        messages=messages,
        answer="",
        input_token_ids=tuple(map(int, words)),
        row=record.line_number,
    )


def _messages(chat: Sequence[Any], record: Record) -> tuple[Message, ...]:
    messages: list[Message] = []
    for message in chat:
        keys = ("role", "content")
        role, content = (message.get(key) if isinstance(message, dict) else None for key in keys)
        if isinstance(content, list):  # parts, which may be images
            parts = cast("list[Any]", content)
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            content = "".join(map(str, texts)) if None not in texts else None
        if role not in get_args(Role) or not isinstance(content, str):
            raise record.error(
                f"the prompt has {message!r:.40}; each message needs a role "
                f"({', '.join(get_args(Role))}) and a text as content"
            )
        messages.append(Message(cast(Role, role), content))
    if not messages or messages[-1].role == "assistant":
        raise record.error("the prompt does not end with a message of the user")
    return tuple(messages)


def _info(record: Record) -> Mapping[str, Any]:
    value: object = record.values.get(INFO_COLUMN)
    if value is None or value == "":
        return {}
    try:
        parsed: object = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        parsed = value
    if not isinstance(parsed, dict):
        raise record.error(f"column '{INFO_COLUMN}' is {value!r:.40}, which is not a JSON object")
    return cast("dict[str, Any]", parsed)
