r"""Reward answer_match: what counts as the answer of a completion."""

from __future__ import annotations

import pytest

from peralta_zmq.environments.answer_match import answer_match, form_of, match_reward

RIGHT = [  # answer of the row, completion
    ("72", "72"),
    ("72", "She has 48 + 24 = 72 clips."),
    ("72", "The answer is 72. I am sure, 100 %."),
    ("1,234.50", "That makes $1234.5"),
    ("-3", "x = \N{MINUS SIGN}3"),
    ("7", "10-3 is 7"),
    ("1e10", r"so \boxed{10000000000}"),
    ("Natalia sold 48/2 = 24 clips.\n#### 72", "In total 72."),
    (r"Adding gives \boxed{5}.", "#### 5"),
    ("Paris", "paris."),
    ("Paris", "It is old.\nThe answer is **Paris**."),
    ("Paris", "<answer>Paris</answer> because of the Seine"),
    ("B", "Reasons...\nAnswer: (B)"),
    ("2, 3, 5", "2, 3, 5"),
    ("(1, 2]", r"It is \boxed{(1, 2]}"),
    ("x^2+1", "x^2+1"),
    ('{"a": 1}', '{"a": 1}'),
    ("72", "The answer is 72 clips in 2 months."),
    ("72", "The answer is 48 + 24 = 72."),
    ("72", r"\boxed{72\text{ clips}}"),
    ("0.5", r"\boxed{\frac12}"),
    ("0.5", r"\boxed{1} \boxed {0.5} \boxed{1"),  # the last complete box
    ("1/2", r"The answer is \dfrac{1}{2}."),
    ("0.5", "It is 1/2"),
    ("$5 per hour", "The answer is $5 per hour."),
    ("5", r"\boxed{\$5}"),
    ("3", "The parts:\n- 4 pens\n- 3 books"),
    ("72", "**72**"),
]
WRONG = [
    ("72", "She has 72 clips, but 12 are broken."),
    ("72", "The answer is 71, not 72."),
    ("72", ""),
    ("72", "7 2"),
    ("Paris", "Not Paris but Rome"),
    ("3", "1,234"),
    ("B", "Because"),
    ("2", r"\boxed{\frac{1}{2}}"),
    ("2", "The answer is 1/2."),
    ("2", r"\boxed{10^2}"),
    ("2", r"\boxed{\sqrt{2}}"),
    ("10", r"\boxed{10^2}"),
    ("3", "1/0"),
    ("2", "2 + 2 + 2"),
    ("3", "5 - 3"),
]


@pytest.mark.parametrize(("answer", "text"), RIGHT)
def test_final_answer_that_is_the_rows_earns_1(answer: str, text: str) -> None:
    assert match_reward(text, answer) == 1.0


@pytest.mark.parametrize(("answer", "text"), WRONG)
def test_other_final_answer_earns_0(answer: str, text: str) -> None:
    assert match_reward(text, answer) == 0.0


def test_latex_is_compared_by_value() -> None:
    pytest.importorskip("math_verify")
    assert match_reward("This is $0.5$", r"\frac{1}{2}") == 1.0
    assert match_reward("This is $0.4$", r"\frac{1}{2}") == 0.0


@pytest.mark.parametrize(
    ("answer", "form"),
    [("$12", "numbers"), ("#### 5", "numbers"), ("a", "texts")],
)
def test_form_follows_the_answer(answer: str, form: str) -> None:
    assert form_of(answer) == form


def test_numbers_of_great_length_are_compared_quickly() -> None:
    assert match_reward("9" * 4000, "1e999") == 0.0


def test_answer_match_has_the_signature_of_trl() -> None:
    chats = [[{"role": "assistant", "content": "7"}], [{"role": "assistant", "content": "8"}]]
    assert answer_match(completions=chats, answer=[7, 7], level=["easy", "easy"]) == [1.0, 0.0]
    assert answer_match(completions=["7", "8"], answer=["7", "7"]) == [1.0, 0.0]
