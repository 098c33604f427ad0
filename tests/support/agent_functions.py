"""Agents for tests, written with the openai package."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any

from openai import AsyncOpenAI, OpenAI

from peralta_zmq.rollout import Problem, Score


def two_turns(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """Two turns; the reward is the number of characters of the last one."""
    messages: Any = [{"role": "user", "content": problem.question}]
    content = ""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for text in ("once more.", ""):
            reply = client.chat.completions.create(model=model, messages=messages)
            content = reply.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": text},
            ]
    return float(len(content))


async def streamed(problem: Problem, base_url: str, api_key: str, model: str) -> Score:
    """One turn by stream, with the row's column as a named reward."""
    messages: Any = [{"role": "user", "content": problem.question}]
    text = ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async for chunk in await client.chat.completions.create(
            model=model, messages=messages, stream=True, max_tokens=5
        ):
            text += chunk.choices[0].delta.content or ""
    return Score(float(len(text)), {"length": float(len(text))})


def rewritten(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """Two turns, the second of which has another history."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for text in (problem.question, "add 5 to 7."):
            messages: Any = [{"role": "user", "content": text}]
            if text != problem.question:
                messages = [*messages, {"role": "assistant", "content": "!"}, *messages]
            client.chat.completions.create(model=model, messages=messages)
    return 1.0


def forked(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """A first turn that two second turns continue."""
    messages: Any = [{"role": "user", "content": problem.question}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        reply = client.chat.completions.create(model=model, messages=messages)
        content = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go."}]
        client.chat.completions.create(model=model, messages=messages, n=2)
    return 1.0


def by_tokens(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """Two requests with token ids, the second of which continues the first."""
    token_ids = [5, 9, 33, 8]
    for _ in range(2):
        body = {"model": model, "token_ids": token_ids, "sampling_params": {"max_tokens": 3}}
        request = urllib.request.Request(
            f"{base_url.removesuffix('/v1')}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"},
        )
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)
        (choice,) = reply["choices"]
        assert reply["prompt_token_ids"] == token_ids
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) <= 3
        token_ids = [*token_ids, *choice["token_ids"], 40]
    return 1.0


def impolite(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """Another model's name, a body that is too large, and a client that leaves in mid-stream."""
    from openai import APIStatusError

    messages: Any = [{"role": "user", "content": problem.question}]
    statuses = list[int]()
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for name, text in (("gpt-9", ""), (model, "x" * (1 << 21)), (model, "x " * 5000)):
            try:
                content: Any = [*messages, {"role": "user", "content": text}]
                client.chat.completions.create(model=name, messages=content)
            except APIStatusError as error:
                statuses.append(error.status_code)
        stream = client.chat.completions.create(model=model, messages=messages, stream=True)
        next(iter(stream))
        stream.close()
        client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert statuses == [404, 413, 400]
    return 1.0


def silent() -> float:
    return 1.0


def raising(problem: Problem) -> float:
    raise ValueError("no idea")


def dying(problem: Problem) -> float:
    os._exit(3)


def hanging(problem: Problem) -> float:
    time.sleep(100)
    return 1.0


def process() -> float:
    return float(os.getpid())


def not_a_number(problem: Problem) -> float:
    return float("nan")
