"""Transcripts that teach the embedded model turns and tool calls."""

from __future__ import annotations

import random
from collections import Counter

from peralta_zmq import models
from peralta_zmq.environments import calculator_tool, guess_number
from peralta_zmq.environments.tool_calls import assistant_message
from peralta_zmq.rollout import Problem
from tools.base_model import NO_TARGET
from tools.turns_base_model import OPERATORS, calculations, guesses, tokens_of


def test_a_third_of_the_second_guesses_is_right() -> None:
    numbers, rewards = random.Random(0), Counter[float]()
    for _ in range(1000):
        messages, _ = guesses(numbers)
        if len(messages) == 4:
            distance, direction = messages[2].content.removeprefix("It is ").rstrip(".").split()
            sign = 1 if direction == "higher" else -1
            number = int(messages[1].content) + sign * int(distance)
            problem = Problem("1", "guess_number", (), str(number))
            assert guess_number.reply(problem, messages[:2]) == messages[2:3]
            rewards[guess_number.reward(problem, messages[3].content)] += 1
    assert 0.28 < rewards[1.0] / rewards.total() < 0.38


def test_calls_in_transcripts_are_answered_by_the_tool() -> None:
    numbers, rewards = random.Random(0), Counter[bool]()
    for _ in range(1000):
        messages, _ = calculations(numbers)
        if len(messages) == 4:
            (call,) = assistant_message(messages[1].content).tool_calls
            assert messages[2].content == calculator_tool.calculate(**call.arguments)
            left, word, right = messages[0].content.removeprefix("What is ").rstrip("?").split()
            result = calculator_tool.calculate(f"{left} {OPERATORS[word]} {right}")
            rewards[messages[3].content == result] += 1
    assert 0.28 < rewards[True] / 1000 < 0.38


def test_targets_are_the_completions_with_their_end_tokens() -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED_TURNS)
    messages, variables = calculations(random.Random(3))
    ids, targets = tokens_of(tokenizer, messages, variables)
    assert len(ids) == len(targets)
    sampled = [token for token in targets if token != NO_TARGET]
    texts = tokenizer.decode(sampled).split("<|im_end|>")  # type: ignore[union-attr]
    assert texts == [*(message.content for message in messages[1::2]), ""]
    assert all(target in (NO_TARGET, token) for token, target in zip(ids, targets, strict=True))
