"""An agent with a tool, written with the openai package as for any other server.

    pip install openai
    bin/lan local @ configs/calculator_agent.toml

`answer` is the agent. `solve` tells how well it does: the program runs it once for each rollout,
records what it asks for, and trains the model with its reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from peralta_zmq.environments import calculator_tool
from peralta_zmq.rollout import Problem


def calculate(expression: str) -> str:
    try:
        return calculator_tool.calculate(expression)
    except ValueError as error:
        return f"error: {error}"


FUNCTIONS = {"calculate": calculate}
EXPRESSION = {"type": "string", "description": "for example 12 * 34"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": EXPRESSION},
                "required": ["expression"],
            },
        },
    }
]


def answer(client: OpenAI, model: str, question: str) -> str:
    """Ask the model, and execute the tools that it calls, up to four times."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(4):
        completion = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            try:
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            except (KeyError, TypeError):
                result = "error: there is no such tool or argument"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def solve(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        return float(answer(client, model, problem.question).strip() == problem.answer)


def problems(split: str, seed: int) -> Iterator[Problem]:
    """The products of the task calculator_tool."""
    return calculator_tool.problems(split, seed)
