"""An agent for real runs: the task calculator in two turns."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from peralta_zmq.environments import calculator
from peralta_zmq.rollout import Problem

problems = calculator.problems


def solve(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """The mean reward of two answers, the second of which sees the first."""
    messages: Any = [{"role": "user", "content": problem.question}]
    rewards = list[float]()
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            reply = client.chat.completions.create(model=model, messages=messages)
            text = reply.choices[0].message.content or ""
            rewards.append(float(calculator.reward(problem, text)))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": problem.question},
            ]
    return sum(rewards) / len(rewards)
