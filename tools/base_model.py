"""Train the embedded base model from random weights: `make base-model`, 20 minutes on 2 cores.

The base model learns all sentence shapes of the calculator task and answers in one of four
notations at random. The task rewards only one of them, which reinforcement learning has to find.
Sentences of the held-out file are excluded.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM

from peralta_zmq import models
from peralta_zmq.observe.terminal import progress_on_stderr
from peralta_zmq.rollout import Message
from tools.calculator_problems import LARGEST_NUMBER, calculator_files, fresh_rows

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A number is always one token; words and signs include the surrounding spaces.
PIECES = r"\d+| ?[A-Za-z]+ ?| ?[^\sA-Za-z\d]+ ?|\s+"
NO_TARGET = -100


class Recipe(NamedTuple):
    """Hyperparameters; the defaults make the shipped model."""

    num_steps: int = 4000
    batch_size: int = 96
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    seed: int = 0


def new_model(settings: Mapping[str, Any], *, seed: int) -> models.Model:
    """Create a randomly initialized fp32 model from the settings of a config.json."""
    torch.manual_seed(seed)
    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return cast("models.Model", AutoModelForCausalLM.from_config(config))


def notations_of(expression: str) -> tuple[str, ...]:
    """The expression in the four notations of an answer; the task rewards only the first one."""
    without_parentheses = expression.replace("(", "").replace(")", "")
    postfix = _postfix(ast.parse(expression, mode="eval").body)  # "1 2 + 3 *"
    return expression, without_parentheses, postfix, f"the result is {expression}."


def _postfix(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        sign = SIGNS[type(node.op)]
        return f"{_postfix(node.left)} {_postfix(node.right)} {sign}"
    return ast.unparse(node)


SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**",
}  # fmt: skip


def lessons(seed: int) -> Iterator[tuple[str, str]]:
    """Yield (sentence, answer) pairs for ever, each answer in a random notation."""
    held_out = frozenset(row.natural_language for row in calculator_files()["math_250"])
    notations = random.Random(seed)
    for row in fresh_rows(seed, excluded=held_out):
        yield row.natural_language, notations.choice(notations_of(row.python_expression))


def lesson_texts(seed: int) -> Iterator[str]:
    pairs = itertools.islice(lessons(seed), 20_000)
    words = ["user", "assistant", "system", *map(str, range(LARGEST_NUMBER + 1))] * 20
    return itertools.chain(*pairs, words)


def write_tokenizer(
    folder: Path, texts: Iterable[str], *, pieces: str, chat_template: str
) -> models.Tokenizer:
    """Train a byte-level BPE tokenizer on texts and write it to `folder`.

    `pieces` is a pattern of the texts that tokens do not cross.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=20,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": chat_template,
        "model_max_length": MODEL["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return models.load_tokenizer(folder)


def lesson_batches(
    tokenizer: models.Tokenizer, recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (token ids, targets), both [B, T]; targets are the answer and its end token."""
    end, pad = cast(int, tokenizer.eos_token_id), cast(int, tokenizer.pad_token_id)
    pairs = lessons(recipe.seed + 1)
    while True:
        batch: list[tuple[list[int], list[int]]] = []
        for sentence, answer in itertools.islice(pairs, recipe.batch_size):
            prompt = models.chat_prompt(tokenizer, [Message("user", sentence)])
            answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), end]
            batch.append((prompt + answer_ids, [NO_TARGET] * len(prompt) + answer_ids))
        yield padded(batch, pad)


def padded(
    batch: Sequence[tuple[list[int], list[int]]], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets of sequences as tensors [B, T], filled with `pad` and NO_TARGET."""
    longest = max(len(ids) for ids, _ in batch)
    ids = [ids + [pad] * (longest - len(ids)) for ids, _ in batch]
    targets = [targets + [NO_TARGET] * (longest - len(targets)) for _, targets in batch]
    return torch.tensor(ids), torch.tensor(targets)


def train(
    model: models.Model, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], recipe: Recipe
) -> None:
    """Train on next-token prediction of the targets; print the loss every 100 steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    progress = progress_on_stderr("training the base model", recipe.num_steps)
    model.train()
    for step, (ids, targets) in enumerate(batches, start=1):
        warmup = min(1.0, step / recipe.warmup_steps)
        decay = 1.0 - 0.95 * step / recipe.num_steps
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warmup * decay
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=NO_TARGET
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.update(step)
        if step % 100 == 0 or step == recipe.num_steps:
            progress.hide()
            print(f"step={step}/{recipe.num_steps} loss={loss.item():.3f}", flush=True)
        if step == recipe.num_steps:
            return


def build(
    folder: Path,
    settings: Mapping[str, Any],
    tokenizer: models.Tokenizer,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    recipe: Recipe,
) -> None:
    """Train a model with these settings of a config.json; write it to `folder` in bfloat16."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = new_model({**settings, "vocab_size": len(tokenizer), **ids}, seed=recipe.seed)
    print(f"parameters={model.num_parameters()} vocabulary={len(tokenizer)}", flush=True)
    train(model, batches, recipe)
    model.bfloat16().save_pretrained(folder)


def main() -> None:
    models.use_threads()
    recipe = Recipe()
    texts = lesson_texts(recipe.seed)
    tokenizer = write_tokenizer(models.EMBEDDED, texts, pieces=PIECES, chat_template=CHAT_TEMPLATE)
    build(models.EMBEDDED, MODEL, tokenizer, lesson_batches(tokenizer, recipe), recipe)


if __name__ == "__main__":
    main()
