"""The problems of a run: its environments, and data sets in CSV and JSONL files.

An environment is a task with a data set; a run may mix several. A data set has one problem per row,
in a column for the prompt and a column for the answer. The column `input_token_ids` may hold the
tokens of the prompt instead. A split is 'train' or 'eval' (held-out problems).
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import inspect
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import length_hint
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.rollout import Message, Problem

DATA_FOLDER = Path(__file__).parent / "data"
SHIPPED = tuple(sorted(file.stem for file in DATA_FOLDER.glob("*.csv")))  # names of data sets
TOKENS_COLUMN = "input_token_ids"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
MAX_TOKEN_ID = 2**31 - 1  # token ids are stored as int32

Split: TypeAlias = Literal["train", "eval"]
Parsed = TypeVar("Parsed")
logger = logging.getLogger(__name__)


# The environments of a run.


class RewardSource(Protocol):
    """Computes rewards, on this machine or on another one."""

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The reward of a completion; a dict holds named terms, whose sum is the reward.

        Raises RewardError.
        """
        ...

    def close(self) -> None:
        """Stop the process or connection that computes rewards."""
        ...


@dataclass(frozen=True, slots=True)
class Environments:
    """Problems and reward functions of all environments. Use with `closing`."""

    sizes: Mapping[str, int]  # number of problems by label of the environment
    problems: tuple[Problem, ...]  # grouped by environment, in the order of `sizes`
    reward_sources: Mapping[str, RewardSource]  # by label, which is the `task` of its problems

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The reward of a completion in the problem's environment. Raises RewardError."""
        return self.reward_sources[problem.task].reward(problem, completion_text)

    def close(self) -> None:
        """Close all reward sources."""
        for source in self.reward_sources.values():
            source.close()

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
    """All problems of a split, as returned by the function `problems` of a task.

    `options` are the settings in [data]. `wrap` may add a progress bar around the iterator. Raises
    ConfigError for an option that the task does not have, and TaskError if the split is empty.
    """
    try:
        inspect.signature(problems).bind(split, seed, **options)
    except TypeError as error:
        raise ConfigError(f"options in [data] do not fit the task: {error}; correct them") from None
    loaded = list(wrap(problems(split, seed, **options)))
    if not loaded:
        raise TaskError(f"the task has no problems for '{split}'; choose a data set in [data]")
    return loaded


def check_tokens(problems: Sequence[Problem], vocab_size: int) -> None:
    """Raise TaskError for `input_token_ids` beyond the model's vocabulary."""
    for problem in problems:
        if problem.input_token_ids and max(problem.input_token_ids) >= vocab_size:
            raise TaskError(
                f"problem {problem.id} of '{problem.task}' has the token "
                f"{max(problem.input_token_ids)} in input_token_ids, but the model has "
                f"{vocab_size} tokens; tokenize it with this model's tokenizer"
            )


def problem_id(values: Sequence[str]) -> str:
    """16 hexadecimal digits of the SHA-256 of the texts that identify a problem."""
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]


def labeled_problem(problem: Problem, label: str, keys: Sequence[str]) -> Problem:
    """The problem with its environment's `label` as task, and a new id.

    The new id is a hash of the fields named in `keys`, the setting curriculum.hash_keys.
    """
    contents = [message.content for message in problem.messages if message.role != "system"]
    values = {
        "task": label,
        "prompt": "\n".join(contents) or problem.question,
        "answer": problem.answer,
        "id": problem.id,
    }
    return replace(problem, task=label, id=problem_id([values[key] for key in keys]))


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
    """The function `problems` of a task whose problems are the rows of a file.

    `task` is the task's name; `train`, `eval` and the columns are defaults of settings in [data].
    `check` raises ValueError for an answer that the reward function cannot use. A row with an
    unusable answer, an empty prompt or invalid `input_token_ids` is skipped and logged with its
    line number.
    """

    def problems(
        split: Split,
        seed: int,  # unused here; a task that generates its problems needs it
        *,
        train: str = train,
        eval: str = eval,
        prompt_column: str = prompt_column,
        answer_column: str = answer_column,
        system_prompt: str = "",
    ) -> Iterator[Problem]:
        """Iterator over the problems of a split, with the number of unread rows as length hint.

        Raises TaskError if the file cannot be read or, at the end, if no row was usable.
        """
        source = train if split == "train" else eval
        rows = read_rows(source, prompt_column=prompt_column, answer_column=answer_column)
        unread = iter(rows)

        def problem_of(row: DataRow) -> Problem:
            check(row.answer)
            return _problem(row, task, system_prompt)

        return _RowProblems(_usable_problems(source, unread, problem_of), unread)

    return problems


def parsed_answer(problem: Problem, parse: Callable[[str], Parsed]) -> Parsed:
    """`parse(problem.answer)`; converts a ValueError of `parse` to TaskError."""
    try:
        return parse(problem.answer)
    except ValueError as reason:
        raise TaskError(
            f"problem {problem.id} has the unusable answer {problem.answer!r:.80} ({reason}); "
            "correct the data set"
        ) from None


class _RowProblems:
    """Iterator over problems; the number of unread rows is its length hint."""

    def __init__(self, problems: Iterator[Problem], unread: Iterator[DataRow]) -> None:
        self._problems, self._unread = problems, unread

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        return next(self._problems)

    def __length_hint__(self) -> int:
        return length_hint(self._unread)


def _usable_problems(
    source: str, rows: Iterator[DataRow], problem_of: Callable[[DataRow], Problem]
) -> Iterator[Problem]:
    """Yield the problems of the rows for which `problem_of` raises no ValueError.

    At the end, logs the refused rows, or raises TaskError if all rows were refused.
    """
    num_kept, refused = 0, list[str]()
    for row in rows:
        try:
            problem = problem_of(row)
        except ValueError as reason:
            refused.append(f"row={row.line_number} answer={row.answer!r:.80} reason='{reason}'")
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
        totals = f"refused={len(refused)} kept={num_kept}"
        logger.warning("event=rows_refused source='%s' %s", source, totals)


def _problem(row: DataRow, task: str, system_prompt: str) -> Problem:
    """The problem of a row; ValueError for an empty prompt or invalid token ids."""
    words = row.token_ids.split()
    if not all(word.isascii() and word.isdigit() and int(word) <= MAX_TOKEN_ID for word in words):
        raise ValueError(f"{TOKENS_COLUMN} must be integers from 0 to {MAX_TOKEN_ID}")
    if not words and not row.prompt.strip():
        raise ValueError("the prompt is empty")
    system = (Message("system", system_prompt),) if system_prompt and not words else ()
    user = (Message("user", row.prompt),) if row.prompt else ()
    return Problem(
        id=problem_id((task, row.prompt or row.token_ids)),
        task=task,
        messages=(*system, *user),
        answer=row.answer,
        input_token_ids=tuple(map(int, words)),
    )


# The rows of a file.


class DataRow(NamedTuple):
    """One row of a data set."""

    line_number: int  # of the row's first line in the file
    prompt: str  # empty if the row has no prompt column
    token_ids: str  # numbers separated by spaces; empty if the row has none
    answer: str


def read_rows(source: str, *, prompt_column: str, answer_column: str) -> list[DataRow]:
    """Read all rows of a data set, in file order; other columns are ignored.

    `source` is the name of a shipped data set or a path. Every row needs an answer, and a prompt or
    `input_token_ids`: a list in JSONL, numbers separated by spaces in CSV. Raises TaskError for a
    file that is missing, empty or not UTF-8, a missing column, and a row that cannot be read.
    """
    path = _path(source)
    parse = _json_records if path.suffix.lower() in JSONL_SUFFIXES else _csv_records
    try:
        records = parse(_read_text(path))
        rows = [_row(number, record, prompt_column, answer_column) for number, record in records]
    except ValueError as error:
        raise TaskError(f"'{source}' {error}") from None
    if not rows:
        raise TaskError(f"'{source}' has no rows; a data set needs at least one")
    return rows


def _path(source: str) -> Path:
    """The file of a shipped data set, or the given path."""
    if source in SHIPPED:
        return DATA_FOLDER / f"{source}.csv"
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it never raises
    if not os.path.isfile(path):
        raise TaskError(
            f"no data set or file '{source}'{_suggestion(path)}; "
            f"choose one of {', '.join(SHIPPED)}, or give the path of a .csv or .jsonl file"
        )
    if path.suffix.lower() not in (".csv", *JSONL_SUFFIXES):
        raise TaskError(f"'{source}' is neither .csv nor .jsonl; convert or rename it")
    return path


def _suggestion(path: Path) -> str:
    """', did you mean X?' for a similarly named data set or file next to `path`."""
    names = {name: name for name in SHIPPED}
    if os.path.isdir(path.parent):
        names |= {file.name: str(file) for file in path.parent.glob("*.*")}
    similar = difflib.get_close_matches(path.name, names, n=1)
    return f", did you mean '{names[similar[0]]}'?" if similar else ""


def _read_text(path: Path) -> str:
    """The file as text without a byte order mark; newlines are not converted.

    Raises ValueError for text that is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TaskError(f"cannot read '{path}': {error.strerror}; check its permissions") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {number}: {error.reason}; save the file as UTF-8") from None


def _csv_records(text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield each record: the number of its first line, and texts by column name.

    The first record names the columns. Blank lines are skipped; quoted text may span lines. Raises
    ValueError for a line that cannot be read.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number, header = 1, list[str]()
    try:
        for fields in reader:
            if not header:
                header = fields
            elif fields:
                if len(fields) != len(header):
                    raise ValueError(
                        f"line {number}: {len(fields)} fields, but the header names {len(header)} "
                        "columns; put quotes around text with a comma in it"
                    )
                yield number, dict(zip(header, fields, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number}: {error}; check the quotes of this row") from None


def _json_records(text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the line number and the object of each line.

    Numbers stay text, so that 0.1 stays exact. Raises ValueError for a line that cannot be read.
    """
    # Only "\n" ends a line: JSON text may contain the other separators of str.splitlines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_int=str, parse_float=str)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = str(error).replace("line 1 ", "")  # json counts lines from the start of `line`
            remedy = "write one flat object on each line"
            raise ValueError(f"line {number}: not JSON ({reason}); {remedy}") from None
        if not isinstance(record, dict):
            reason = f"{line.strip():.40} is not an object"
            raise ValueError(f"line {number}: {reason}; write one object on each line")
        yield number, cast("dict[str, object]", record)


def _row(
    number: int, record: Mapping[str, object], prompt_column: str, answer_column: str
) -> DataRow:
    """The row of a record; ValueError for a missing column or a value that is not text."""
    prompts = [column for column in (prompt_column, TOKENS_COLUMN) if column in record]
    columns = [*(prompts or [prompt_column]), answer_column]
    for column in columns:
        if column not in record:
            names = (
                f"the columns are {', '.join(map(repr, record))}" if record else "the row is empty"
            )
            raise ValueError(f"line {number}: no column '{column}'; {names}")
    texts = {column: _text(record[column], column, number) for column in columns}
    return DataRow(
        number, texts.get(prompt_column, ""), texts.get(TOKENS_COLUMN, ""), texts[answer_column]
    )


def _text(value: object, column: str, number: int) -> str:
    """The text of a string, a JSON number (already text) or a list of token ids.

    Raises ValueError for other types, and for a lone surrogate such as the JSON escape \\ud800.
    """
    if column == TOKENS_COLUMN and isinstance(value, list):
        return " ".join(map(str, cast("list[object]", value)))
    place = f"line {number}: column '{column}'"
    if not isinstance(value, str):
        raise ValueError(f"{place} is {value!r:.40}; it must be text or a number")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} has a lone surrogate {value!a:.40}") from None
    return value
