"""An agent with two tools in plain text, for models whose chat template renders no tools.

    pip install openai
    bin/lan local @ configs/shop_agent.toml --model.name MODEL

`answer` is the agent, which knows nothing of training. `solve` tells how well it does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from peralta_zmq.rollout import Message, Problem

PRICES = {
    "apple": 34, "basket": 57, "candle": 83, "drum": 96, "envelope": 12, "flute": 78, "glove": 45,
    "hammer": 69, "inkpot": 28, "jar": 53, "kettle": 91, "lamp": 87, "mirror": 64, "needle": 15,
}  # fmt: skip
SYSTEM = (
    "Answer with one tool call, or with the answer. "
    "price(ITEM) is the price of one item. multiply(A, B) is a product."
)
EXAMPLE = (
    "What do 7 spoons cost?", "price(spoon)", "24", "multiply(7, 24)", "168", "answer: 168",
)  # fmt: skip


def price(item: str) -> str:
    return str(PRICES.get(item.lower().removesuffix("s"), "unknown item"))


def multiply(first: str, second: str) -> str:
    return str(int(first) * int(second))


CALLS = {re.compile(r"price\((\w+)\)"): price, re.compile(r"multiply\((\d+), (\d+)\)"): multiply}


def answer(client: OpenAI, model: str, question: str) -> str:
    """Ask the model, and execute the tools that it calls, up to four times."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for number, text in enumerate((*EXAMPLE, question)):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    for _ in range(4):
        completion = client.chat.completions.create(model=model, messages=messages)
        text = completion.choices[0].message.content or ""
        if text.startswith("answer: "):
            return text.removeprefix("answer: ")
        calls = [(tool, found) for form, tool in CALLS.items() if (found := form.fullmatch(text))]
        result = calls[0][0](*calls[0][1].groups()) if calls else "no such tool"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    return ""


def solve(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        return float(answer(client, model, problem.question) == problem.answer)


def problems(split: str, seed: int) -> Iterator[Problem]:
    """Prices of 2 to 40 items; 60 of 546 questions are held out."""
    pairs = [(number, item) for item in PRICES for number in range(2, 41)]
    random.Random(0).shuffle(pairs)
    for number, item in pairs[:60] if split == "eval" else pairs[60:]:
        question = f"What do {number} {item}s cost?"
        yield Problem(question, "shop", (Message("user", question),), str(number * PRICES[item]))
