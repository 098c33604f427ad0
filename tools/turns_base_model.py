"""Train the embedded base model for several turns: `make turns-base-model`, 7 minutes on a core.

The model learns the format of two tasks, guess_number and calculator_tool, with three habits for
each, one at random in each transcript. One of them earns the reward, which reinforcement learning
has to find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch

from peralta_zmq import models
from peralta_zmq.environments import calculator_tool, guess_number
from peralta_zmq.environments.tool_calls import schema_of
from peralta_zmq.rollout import Message
from tools.base_model import MODEL, NO_TARGET, Recipe, build, padded, write_tokenizer

SMALLER = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 384}
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A digit is always one token; words and signs include the surrounding spaces.
PIECES = r"\d| ?[A-Za-z]+ ?| ?[^\sA-Za-z\d]+ ?|\s+"
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
TOOLS = [schema_of(tool) for tool in calculator_tool.tools]
RECIPE = Recipe(num_steps=1150, batch_size=32, learning_rate=3e-3)
# The messages of an episode, and the variables of the chat template.
Transcript: TypeAlias = "tuple[list[Message], dict[str, Any]]"


# Transcripts.


def guesses(numbers: random.Random) -> Transcript:
    """Two guesses; the second one is the number, the first one again, or the distance."""
    low = 10 * numbers.randrange(100, 1000)
    number, guess = low + numbers.randrange(10), low + numbers.randrange(10)
    messages = [
        Message("user", f"Guess a number from {low} to {low + 9}."),
        Message("assistant", str(guess)),
    ]
    if guess != number:
        second = numbers.choice([number, guess, abs(number - guess)])
        feedback = guess_number.feedback(str(guess), number)
        messages += [Message("user", feedback), Message("assistant", str(second))]
    return messages, {}


def calculations(numbers: random.Random) -> Transcript:
    """An answer with the result of a tool, with that of another operation, or without the tool."""
    left, right = numbers.randint(100, 999), numbers.randint(100, 999)
    word, sign = numbers.choice(list(OPERATORS.items()))
    question = f"What is {left} {word} {right}?"
    habit = numbers.randrange(3)
    if habit == 0:
        guess = Message("assistant", str(numbers.randrange(10 ** numbers.randint(3, 6))))
        return [Message("user", question), guess], {"tools": TOOLS}
    if habit == 1:
        sign = numbers.choice(sorted(set(OPERATORS.values()) - {sign}))
    expression = f"{left} {sign} {right}"
    result = calculator_tool.calculate(expression)
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return [
        Message("user", question),
        Message("assistant", f"<tool_call>\n{call}\n</tool_call>"),
        Message("tool", result, "calculate"),
        Message("assistant", result),
    ], {"tools": TOOLS}


def tokens_of(
    tokenizer: models.Tokenizer, messages: Sequence[Message], variables: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Token ids and targets of a transcript; targets are the completions with their end tokens."""
    end = cast(int, tokenizer.eos_token_id)
    ids = models.chat_prompt(tokenizer, messages[:1], **variables)
    targets = [NO_TARGET] * len(ids)
    for position in range(1, len(messages), 2):
        if position > 1:
            chat, reply = messages[: position - 1], messages[position - 1 : position]
            between = models.continuation_ids(
                tokenizer, chat, reply, ended=True, chat_template_kwargs=variables
            )
            ids, targets = ids + between, targets + [NO_TARGET] * len(between)
        text = messages[position].content
        sampled = [*tokenizer.encode(text, add_special_tokens=False), end]
        ids, targets = ids + sampled, targets + sampled
    return ids, targets


def transcript_batches(
    tokenizer: models.Tokenizer, recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (token ids, targets), both [B, T], of guesses twice as often as of calculations."""
    pad, numbers = cast(int, tokenizer.pad_token_id), random.Random(recipe.seed + 1)
    sources: tuple[Callable[[random.Random], Transcript], ...] = guesses, guesses, calculations
    while True:
        for source in sources:
            batch = [tokens_of(tokenizer, *source(numbers)) for _ in range(recipe.batch_size)]
            yield padded(batch, pad)


def transcript_texts(tokenizer_seed: int) -> Iterator[str]:
    numbers = random.Random(tokenizer_seed)
    for _ in range(500):
        for source in (guesses, calculations):
            messages, variables = source(numbers)
            yield json.dumps(variables)
            for message in messages:
                yield from (message.role, message.content)


def main() -> None:
    models.use_threads()
    texts = transcript_texts(RECIPE.seed)
    folder = models.EMBEDDED_TURNS
    tokenizer = write_tokenizer(folder, texts, pieces=PIECES, chat_template=CHAT_TEMPLATE)
    batches = transcript_batches(tokenizer, RECIPE)
    build(folder, {**MODEL, **SMALLER}, tokenizer, batches, RECIPE)


if __name__ == "__main__":
    main()
