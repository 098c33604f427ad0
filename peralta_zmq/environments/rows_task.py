"""Task rows: problems from any data set, scored by a reward function of the user or answer_match.

Every column but prompt and answer reaches the reward function by its name. Without
`data.prompt_column` and `data.answer_column`, the columns are found by the names that data sets for
TRL, verl and open-r1 have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from peralta_zmq.environments.answer_match import form_of, is_empty, match_reward
from peralta_zmq.environments.data_files import Record, folder_splits, read_records
from peralta_zmq.environments.dataset import (
    INFO_COLUMN,
    Split,
    problem_of_record,
    usable_problems,
)
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem

PROMPT_COLUMNS = ("prompt", "problem", "question", "instruction", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")
EVAL_SPLITS = ("eval", "validation", "test")  # of a folder with several, in order of preference


def problems(
    split: Split,
    seed: int,
    *,
    train: str = "",
    eval: str = "",
    prompt_column: str = "",
    answer_column: str = "",
    system_prompt: str = "",
) -> Iterator[Problem]:
    """Iterator over the problems of a split, with the number of unread rows as length hint.

    Without `eval`, the held-out problems are the split for it in the folder `train`, or one row of
    ten, at most 100, which the training then lacks; with fewer than ten rows, both have all. Raises
    TaskError if a file cannot be read, for a missing column, and if no row was usable.
    """
    if not train and not (eval and split == "eval"):
        raise TaskError("task rows has no data set; set data.train to a file")
    source = eval if split == "eval" and eval else train
    records = _records_of(split, source, eval)
    columns = records[0].values
    prompt = prompt_column or next((name for name in PROMPT_COLUMNS if name in columns), "prompt")
    answer = answer_column or next((name for name in ANSWER_COLUMNS if name in columns), "")
    # A column `answer` that is not the answer would take its place as an argument.
    hidden = {prompt, "answer"} - {answer}

    def problem_of(record: Record) -> Problem:
        info = {name: value for name, value in record.values.items() if name not in hidden}
        extra = info.pop(INFO_COLUMN, None)
        info |= extra if isinstance(extra, dict) else {} if extra is None else {INFO_COLUMN: extra}
        return replace(
            problem_of_record(record, "rows", prompt, system_prompt),
            answer=_answer_of(record, answer),
            info=info,
            is_text=not isinstance(record.values.get(prompt), list),
        )

    return usable_problems(records, problem_of)


def reward(problem: Problem, completion_text: str) -> float:
    return match_reward(completion_text, problem.answer)


def check_answers(problems: Sequence[Problem]) -> None:
    """Raise TaskError for rows without an answer that `reward` could compare."""
    if without := [problem.row for problem in problems if is_empty(problem.answer)]:
        raise TaskError(
            f"{len(without)} of {len(problems)} rows have no answer, the first is row {without[0]};"
            " set data.answer_column, or task.reward to a function of your own"
        )
    answer_forms(problems)  # raises if a library for them is missing


def answer_forms(problems: Sequence[Problem]) -> str:
    """Numbers of answers by how `reward` compares them, such as '50 numbers, 4 texts'."""
    forms = [form_of(problem.answer) for problem in problems]
    return ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))


def _records_of(split: Split, source: str, eval: str) -> list[Record]:
    splits = folder_splits(source)
    held_out = next((name for name in EVAL_SPLITS if name in splits), "")
    if split == "eval" and held_out:
        return read_records(source, held_out)
    trained = "train" if "train" in splits else "".join(splits[:1])
    records = read_records(source, trained)
    num_held_out = min(100, len(records) // 10)
    if eval or held_out or num_held_out == 0:
        return records
    indices = {index * len(records) // num_held_out for index in range(num_held_out)}
    return [row for index, row in enumerate(records) if (index in indices) == (split == "eval")]


def _answer_of(record: Record, column: str) -> str:
    if column:
        if column not in record.texts:
            raise record.missing_column(column, setting="data.answer_column")
        return _text(record.texts[column], record.values[column])
    rules = [values.get("reward_model") for values in (record.texts, record.values)]
    text, value = (rule.get("ground_truth") if isinstance(rule, dict) else None for rule in rules)
    return _text(text, value)


def _text(text: Any, value: Any) -> str:
    """The text of a text or number, another JSON value in JSON, and nothing for null."""
    if value is None:
        return ""
    return text if isinstance(text, str) else json.dumps(value, ensure_ascii=False)
