"""Task rows: own data sets in the forms of TRL, verl and open-r1, with own rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.build import open_environments
from peralta_zmq.config import Config, load_config
from peralta_zmq.environments.rows_task import problems
from peralta_zmq.errors import ConfigError, PeraltaError, TaskError
from peralta_zmq.rollout import Message, Problem

REWARDS = '''
import functools

def score(problem, completion_text, level):
    """Ours, with a column."""
    return level + (completion_text == problem.answer)

def trl(completions, solution, level, **columns):
    """The form of TRL."""
    return [float(text == target) + n for text, target, n in zip(completions, solution, level)]

def chats(prompts, completions, **columns):
    return [float(chat[-1]["content"] == "4" and prompt[0]["role"] == "system")
            for prompt, chat in zip(prompts, completions)]

class Judge:
    def __call__(self, problem, completion_text):
        return 0.25

judge = Judge()
def with_bonus(problem, completion_text, bonus):
    return bonus + (completion_text == problem.answer)

bound = functools.partial(with_bonus, bonus=2)

def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments, **keywords):
        return function(*arguments, **keywords)
    return wrapper

@decorated
def wrapped(completions, **columns):
    return [0.5] * len(completions)
'''


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(*arguments: str) -> Config:
    return load_config("bin/x", arguments)


def column_problems(path: Path, split: Any = "train", **options: str) -> list[Problem]:
    return list(problems(split, 0, train=str(path), **options))


TWO = [
    {"prompt": "2+2?", "answer": "4", "solution": "4", "level": 1},
    {"prompt": "3+3?", "answer": "6", "solution": "6", "level": 2},
]


def test_data_file_without_task_is_the_task_rows(tmp_path: Path) -> None:
    config = load("--data.train", str(write_rows(tmp_path / "my.jsonl", TWO)))
    with closing(open_environments(config, "train")) as environments:
        assert environments.sizes == {"rows": 2}
        first = environments.problems[0]
        assert first.messages == (Message("user", "2+2?"),)
        assert first.info == {"answer": "4", "solution": "4", "level": 1}
        assert [environments.reward(first, text) for text in ("4", "It is 4.", "5")] == [1, 1, 0]


def test_file_with_the_columns_of_the_calculator_is_its_task(tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("natural_language,python_expression\nadd 1 and 2,1 + 2\n")
    with closing(open_environments(load(f"--data.train={tmp_path}/sums.csv"), "train")) as opened:
        assert opened.sizes == {"calculator": 1}
        assert opened.reward(opened.problems[0], "2 + 1") == 1.0


@pytest.mark.parametrize(
    ("function", "expected"),
    [("score", 2.0), ("trl", 2.0), ("judge", 0.25), ("bound", 3.0), ("wrapped", 0.5)],
)
def test_reward_in_a_file_scores_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, expected: float
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "my.jsonl", TWO)
    config = load("--data.train", "my.jsonl", "--task.reward", f"my_rewards.py:{function}")
    with closing(open_environments(config, "train")) as environments:
        assert environments.reward(environments.problems[0], "4") == expected


def test_file_in_another_folder_imports_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/constants_of_lab.py").write_text("BONUS = 7.0\n")
    (tmp_path / "lab/score.py").write_text(
        "from constants_of_lab import BONUS\ndef score(problem, text): return BONUS\n"
    )
    rows = str(write_rows(tmp_path / "my.jsonl", TWO))
    config = load("--data.train", rows, "--task.reward", f"{tmp_path}/lab/score.py:score")
    with closing(open_environments(config, "train")) as environments:
        assert environments.reward(environments.problems[0], "4") == 7.0


@pytest.mark.parametrize("name", ["my_task.py", "my_task_module"])
def test_task_is_a_file_or_a_plain_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "from peralta_zmq.rollout import Message, Problem\n"
        "def problems(split, seed): yield Problem('1', 'x', (Message('user', 'Hi'),), 'yo')\n"
        "def reward(problem, text): return float(text == problem.answer)\n"
    )
    (tmp_path / f"{name.removesuffix('.py')}.py").write_text(text)
    with closing(open_environments(load("--task.name", name), "train")) as environments:
        assert environments.reward(environments.problems[0], "yo") == 1.0


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
FORMS: dict[str, dict[str, Any]] = {
    "trl": {"prompt": CHAT, "solution": "4"},
    "verl": {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "4"}},
    "open_r1": {"problem": "2+2?", "solution": "4", "messages": CHAT},
    "gsm8k": {"question": "2+2?", "answer": "2 and 2\n#### 4"},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_other_programs_are_read(tmp_path: Path, form: str) -> None:
    path = write_rows(tmp_path / "x.jsonl", [FORMS[form]] * 2)
    problem = column_problems(path)[0]
    assert problem.messages[-1] == Message("user", "2+2?")
    assert (problem.messages[0].role == "system") == (form in ("trl", "verl"))
    config = load("--data.train", str(path))
    with closing(open_environments(config, "train")) as environments:
        rewards = [environments.reward(environments.problems[0], text) for text in ("4", "5")]
    assert rewards == [1.0, 0.0]


def test_function_of_trl_gets_messages_for_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "my.jsonl", [FORMS["trl"]] * 2)
    config = load("--data.train", "my.jsonl", "--task.reward", "my_rewards.py:chats")
    with closing(open_environments(config, "train")) as environments:
        assert environments.reward(environments.problems[0], "4") == 1.0


def test_a_tenth_of_the_rows_is_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(60)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    train = {problem.answer for problem in column_problems(path)}
    held_out = {problem.answer for problem in column_problems(path, "eval")}
    assert len(train) == 54
    assert len(held_out) == 6
    assert not train & held_out
    assert len(column_problems(path, eval=str(path))) == 60


def test_few_rows_are_not_divided(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", TWO)
    assert column_problems(path) == column_problems(path, "eval")


def test_answers_may_be_any_json(tmp_path: Path) -> None:
    answers = ["a", 0.1, True, ["x", 1], {"b": None}, None]
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "?", "answer": each} for each in answers])
    found = [(each.answer, each.info["answer"]) for each in column_problems(path)]
    texts = ["a", "0.1", "true", '["x", 1]', '{"b": null}', ""]
    assert found == list(zip(texts, answers, strict=True))


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "?", "answer": "1"}, {}, "data.prompt_column"),
        ({"prompt": "?", "y": "1"}, {"answer_column": "x"}, "data.answer_column"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, {}, "needs a role"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "needs a role"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, {}, "message of the user"),
        ({"prompt": []}, {}, "message of the user"),
    ],
)
def test_unusable_column_is_named(
    tmp_path: Path, row: dict[str, Any], options: dict[str, str], message: str
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [row])
    with pytest.raises(TaskError, match=message):
        column_problems(path, **options)


def test_another_answer_column_takes_the_place_of_answer(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "answer": "four", "final": 4, "info": "from a book"}
    path = write_rows(tmp_path / "x.jsonl", [row])
    config = load(
        "--data.train", str(path), "--data.answer-column=final", "--task.reward=answer_match"
    )
    with closing(open_environments(config, "train")) as environments:
        problem = environments.problems[0]
        assert problem.info == {"final": 4, "info": "from a book"}
        assert [environments.reward(problem, text) for text in ("4", "four")] == [1.0, 0.0]


def test_key_that_a_row_has_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "?", "answer": 1, "answer": 2}\n')
    with pytest.raises(TaskError, match="two values have the name 'answer'"):
        column_problems(tmp_path / "x.jsonl")


def test_held_out_file_alone_is_the_task_rows(tmp_path: Path) -> None:
    config = load("--data.eval", str(write_rows(tmp_path / "x.jsonl", TWO)))
    with closing(open_environments(config, "eval")) as environments:
        assert environments.sizes == {"rows": 2}


def test_rows_without_answers_need_a_reward(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "x.jsonl", [{"prompt": "?"}]))
    with pytest.raises(TaskError, match=r"data\.answer_column, or task\.reward"):
        open_environments(load("--data.train", rows), "train")
    (tmp_path / "r.py").write_text(
        "def length(completions, **c): return [*map(len, completions)]\n"
    )
    config = load("--data.train", rows, "--task.reward", f"{tmp_path}/r.py:length")
    with closing(open_environments(config, "train")) as environments:
        assert environments.reward(environments.problems[0], "abc") == 3.0


def test_folder_of_datasets_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for split, first in (("train", 0), ("test", 10)):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        table = pyarrow.table({"prompt": [f"{first + n}?" for n in range(3)], "answer": [1, 2, 3]})
        with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as out:
            out.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (folder / "state.json").write_text(json.dumps(state))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    whole = column_problems(tmp_path / "saved")
    assert [problem.question for problem in whole] == ["0?", "1?", "2?"]
    held_out = column_problems(tmp_path / "saved", "eval")
    assert [problem.question for problem in held_out] == ["10?", "11?", "12?"]
    assert [each.answer for each in column_problems(tmp_path / "saved/train")] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("reward", "missing.py:score", "no file missing.py"),
        ("reward", "my_rewards.py", "my_rewards.py:FUNCTION"),
        ("reward", "my_rewards.py:scor", "scor"),
        ("reward", "broken.py:score", "NameError.*line 1"),
        ("name", "missing.py", "no file missing.py"),
        ("name", "calculater", "did you mean calculator"),
    ],
)
def test_name_that_cannot_be_imported_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("undefined\n")
    rows = str(write_rows(tmp_path / "x.jsonl", TWO))
    with pytest.raises((ConfigError, PeraltaError), match=message):
        open_environments(load("--data.train", rows, f"--task.{setting}", value), "train")
