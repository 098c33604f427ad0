r"""Reward answer_match: compares the final answer of a completion with the answer of a row.

The form of the row's answer decides: numbers and fractions are compared by value, LaTeX with
math_answers, other texts letter by letter. The final answer of a completion is the content of the
last \boxed{...} or <answer>...</answer>, what follows `####` or "answer is", or else the last
number or line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from peralta_zmq.environments import math_answers
from peralta_zmq.environments.shipped_rewards import Completions, last_text
from peralta_zmq.rollout import Problem

Form: TypeAlias = Literal["numbers", "LaTeX", "texts"]

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400})(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"
QUANTITY = re.compile(r"((?:(?<![\w)])-)?" + NUMBER + r")(?:\s*/\s*(\d{1,20}))?")
FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(-?\d+)\}\s*\{(\d+)\}|(\d)(\d))")
LATEX = re.compile(r"\\[a-zA-Z]|\$[^$]+\$|\^")
MARKED = re.compile(  # a final answer, up to the end of its line or element
    r"####(?P<hashes>[^\n]*)|<answer>(?P<element>.*?)</answer>"
    r"|\banswer(?:\s+is|\s*:)(?P<phrase>[^\n]*)",
    re.IGNORECASE | re.DOTALL,
)
CLAUSE_END = re.compile(r"[.,;!?](?=\s|$)")
# After and before a number that is only a part of a formula.
CONTINUES = re.compile(r"\s*[*^+/]\s*[\d(]|\s*-\s*\d")
FOLLOWS = re.compile(r"\S[ \t]*[-+*/^][ \t]*$")


def answer_match(completions: Completions, answer: Sequence[Any], **columns: Any) -> list[float]:
    """Rewards of a group, in TRL's signature: 1 for a completion with the row's answer, else 0."""
    pairs = zip(map(last_text, completions), answer, strict=True)
    return [match_reward(text, str(target)) for text, target in pairs]


def match_reward(text: str, answer: str) -> float:
    """1 if the final answer in `text` is `answer`, else 0; a text that is the answer earns 1."""
    target = final_answer(answer)
    if _normalized(text) in (_normalized(answer), _normalized(target)):
        return 1.0
    form = form_of(answer)
    if form == "LaTeX":
        return math_answers.reward(Problem("", "", (), target), text)
    marked = _marked(text)
    clause = CLAUSE_END.split(marked, maxsplit=1)[0]
    if form == "texts":
        lines = text.strip().splitlines()[-1:]
        finals = [marked, clause] if marked else lines
        return float(_normalized(target) in map(_normalized, finals))
    return float(_final_value(clause, text) == _value(target))


@functools.lru_cache(maxsize=4096)
def form_of(answer: str) -> Form:
    """How an answer is compared. Raises ConfigError for LaTeX without the extra `math`."""
    target = final_answer(answer)
    if _value(target) is not None:
        return "numbers"
    if LATEX.search(target):
        try:
            math_answers.parse_target(target)
            return "LaTeX"
        except ValueError:
            pass  # for example a price or a path
    return "texts"


def final_answer(answer: str) -> str:
    """The final answer in the answer of a row, which may be a solution in several steps."""
    return (_marked(answer) if "####" in answer or "\\boxed" in answer else answer).strip()


def is_empty(answer: str) -> bool:
    """Whether a row has no answer that a completion could give."""
    return not _normalized(final_answer(answer))


def _marked(text: str) -> str:
    """The content of the last mark of a final answer; empty if there is none."""
    text = text[-4000:]  # the last characters of a long completion
    if box := math_answers.last_box(text):
        return box
    marks = [next(filter(None, match.groups()), "") for match in MARKED.finditer(text)]
    return marks[-1].strip(" \t*:") if marks else ""


def _final_value(clause: str, text: str) -> Fraction | None:
    """The number in the final answer of a completion; None for a formula and without a number.

    In a marked answer the first one after the last equals sign, because units may follow; in a
    whole text the last one.
    """
    plain = _plain(clause.rpartition("=")[2] if clause else text[-4000:])
    matches = list(QUANTITY.finditer(plain))
    if not matches:
        return None
    match = matches[0] if clause else matches[-1]
    before = plain[: match.start()]
    if CONTINUES.match(plain, match.end()) or FOLLOWS.search(before) or (clause and "\\" in before):
        return None
    return _value_of(match)


def _value(text: str) -> Fraction | None:
    """The value of a text that is a number such as 1,234.50, $12, 5 %, 1/2 or \\frac{1}{2}."""
    plain = _plain(text).strip().strip("$%€£ ").removesuffix(".").strip("$%€£ ")
    match = QUANTITY.fullmatch(plain.removeprefix("+"))
    return _value_of(match) if match else None


def _value_of(match: re.Match[str]) -> Fraction | None:
    denominator = int(match[2] or 1)
    return Fraction(match[1].replace(",", "")) / denominator if denominator else None


def _plain(text: str) -> str:
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "$").replace("\\%", "%")
    return FRACTION.sub(lambda match: f"{match[1] or match[3]}/{match[2] or match[4]}", text)


def _normalized(text: str) -> str:
    """Text without differences of case, spaces, quotation marks and a final period."""
    return " ".join(text.casefold().split()).removesuffix(".").strip("\"'`*()")
