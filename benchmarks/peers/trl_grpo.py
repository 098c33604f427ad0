"""TRL's GRPOTrainer on the embedded task: its own loss and advantages, nothing logged or saved.

One process with all cores. Knows TRL; knows nothing of our trainer.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.task import asked, chat, problems, say
from peralta_zmq.environments import calculator
from peralta_zmq.rollout import Problem


class Rows(TrainerCallback):
    """Says when training begins and what each step was paid."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.seconds = dict.fromkeys(("generate", "score", "train"), 0.0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Everything is loaded."""
        say(begun=True)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """The weights have changed."""
        say(step=state.global_step, reward=self.reward, bytes=0, seconds=self.seconds)
        self.seconds = dict.fromkeys(self.seconds, 0.0)


class Timed(GRPOTrainer):
    """Counts the seconds of sampling, of what is made of it (logprobs, rewards, advantages), and of
    forward and backward; the optimizer's are in none of them.
    """

    def __init__(self, rows: Rows, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows = rows

    def training_step(self, *given: Any, **named: Any) -> Any:
        """All of a step but the optimizer's part."""
        return self.timed("train", super().training_step, *given, **named)

    def _prepare_inputs(self, *given: Any, **named: Any) -> Any:
        """Within training_step."""
        return self.timed("score", super()._prepare_inputs, *given, within="train", **named)

    def _generate(self, *given: Any, **named: Any) -> Any:
        """Within _prepare_inputs."""
        return self.timed("generate", super()._generate, *given, within="score", **named)

    def timed(self, part: str, work: Any, *given: Any, within: str = "", **named: Any) -> Any:
        """What `work` returns; its seconds belong to `part` and no longer to what it is within."""
        began = time.perf_counter()
        result = work(*given, **named)
        taken = time.perf_counter() - began
        self.rows.seconds[part] += taken
        if within:
            self.rows.seconds[within] -= taken
        return result


def main() -> None:
    """Train until somebody ends us, or to max_steps."""
    task, rows = asked(), Rows()
    asked_for = problems(task)
    by_answer = {each.answer: each for each in asked_for}

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        paid = [
            calculator.reward(by_answer[target], said[0]["content"])
            for said, target in zip(completions, answer, strict=True)
        ]
        rows.reward = sum(paid) / len(paid)
        return paid

    settings = GRPOConfig(
        output_dir=task.folder, use_cpu=True, bf16=False, seed=task.seed,
        per_device_train_batch_size=task.batch_size, gradient_accumulation_steps=1,
        num_generations=task.num_generations, max_completion_length=task.max_completion_length,
        temperature=task.temperature, top_p=1.0, top_k=0,
        learning_rate=task.learning_rate, lr_scheduler_type="linear", max_steps=task.max_steps,
        adam_beta2=task.adam_beta2, max_grad_norm=task.max_grad_norm,
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    Timed(
        rows,
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left"),
        reward_funcs=reward,
        args=settings,
        train_dataset=dataset_of(asked_for),
        callbacks=[rows],
    ).train()


def dataset_of(asked_for: list[Problem]) -> Dataset:
    """The problems as TRL takes them."""
    return Dataset.from_list([{"prompt": chat(each), "answer": each.answer} for each in asked_for])


if __name__ == "__main__":
    main()
