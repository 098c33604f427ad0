"""From rows to problems, the same for every shipped task.

Knows columns, prompts and identities; knows nothing of what an answer is worth.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from operator import length_hint

from peralta_zmq.environments.dataset import TOKENS, DataRow, read_rows
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, Problem

MAX_TOKEN_ID = 2**31 - 1

log = logging.getLogger(__name__)


def problems_from(
    source: str,
    *,
    task: str,
    prompt_column: str,
    answer_column: str,
    system_prompt: str = "",
    check: Callable[[str], object] = str.strip,
) -> Iterator[Problem]:
    """Every row of a file once, in file order; `length_hint` tells how many rows are left.

    A row is left out, and logged with its number, when it asks nothing, when its
    `input_token_ids` are no token ids, or when `check` of its answer raises ValueError. Raises
    TaskError when the file cannot be read or, at the end, no row is left.
    """

    def made_of(rows: Iterator[DataRow]) -> Iterator[Problem]:
        num_kept, refused = 0, list[str]()
        for row in rows:
            answer = row.columns[answer_column]
            try:
                check(answer)
                problem = _problem_of(row, task, prompt_column, answer, system_prompt)
            except ValueError as reason:
                refused.append(f"row={row.number} {answer_column}={answer!r:.80} reason='{reason}'")
                continue
            num_kept += 1
            yield problem
        _conclude(source, refused, num_kept=num_kept)

    rows = read_rows(source, columns=(answer_column,), prompt_column=prompt_column)
    return _Counted(rows, made_of)


class _Counted:
    """What is made of rows, one after the other, and how many rows are still to be looked at."""

    def __init__(
        self, rows: Sequence[DataRow], made_of: Callable[[Iterator[DataRow]], Iterator[Problem]]
    ) -> None:
        self._left = iter(rows)
        self._made = made_of(self._left)

    def __iter__(self) -> Iterator[Problem]:
        return self

    def __next__(self) -> Problem:
        return next(self._made)

    def __length_hint__(self) -> int:
        return length_hint(self._left)


def identity(values: Sequence[str]) -> str:
    """What tells one problem from another: 16 hexadecimal digits of a sha256."""
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]


def _problem_of(
    row: DataRow, task: str, prompt_column: str, answer: str, system_prompt: str
) -> Problem:
    """Raises ValueError with the reason when a row asks nothing."""
    tokens = _tokens_of(row.columns.get(TOKENS, ""))
    prompt = row.columns.get(prompt_column, "")
    if not tokens and not prompt.strip():
        raise ValueError(f"{prompt_column} is empty")
    system = (Message("system", system_prompt),) if system_prompt and not tokens else ()
    user = (Message("user", prompt),) if prompt else ()
    return Problem(
        id=identity((task, prompt or row.columns[TOKENS])),
        task=task,
        messages=(*system, *user),
        answer=answer,
        input_token_ids=tokens,
    )


def _tokens_of(text: str) -> tuple[int, ...]:
    words = text.split()
    if not all(each.isascii() and each.isdigit() and int(each) <= MAX_TOKEN_ID for each in words):
        raise ValueError(f"{TOKENS} must be whole numbers from 0 on")
    return tuple(map(int, words))


def _conclude(source: str, refused: list[str], *, num_kept: int) -> None:
    """Log what was left out; raise TaskError when that is all."""
    if not num_kept:
        raise TaskError(
            f"none of the {len(refused)} rows of '{source}' can be used, the first is "
            f"{refused[0]}; name the right columns or mend the file"
        )
    for line in refused:
        log.warning("event=row_refused source='%s' %s", source, line)
    if refused:
        log.warning(
            "event=rows_refused source='%s' refused=%d kept=%d", source, len(refused), num_kept
        )
