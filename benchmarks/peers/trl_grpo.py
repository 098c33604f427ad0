"""TRL's GRPOTrainer on a task, with its own loss and advantages, without logs and saves.

One process that uses all cores.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.task import chat, environment, problems, read_task, report
from peralta_zmq.rollout import Problem


class Rows(TrainerCallback):
    """Reports the start of training and the reward of each step."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.tokens = 0  # generated

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Report the start: everything is loaded."""
        report(started=True)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Report a completed step."""
        report(step=state.global_step, reward=self.reward, tokens=self.tokens, bytes=0)


def main() -> None:
    """Train for max_steps, or until the process is killed."""
    task, rows = read_task(), Rows()
    score = environment(task).reward
    training_problems = problems(task)
    by_answer = {problem.answer: problem for problem in training_problems}

    def reward(
        completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        rewards = [
            score(by_answer[target], messages[0]["content"])
            for messages, target in zip(completions, answer, strict=True)
        ]
        rows.reward = sum(rewards) / len(rewards)
        rows.tokens = sum(map(len, completion_ids))
        return rewards

    settings = GRPOConfig(
        output_dir=task.folder, use_cpu=True, bf16=task.dtype == "bfloat16", seed=task.seed,
        per_device_train_batch_size=task.batch_size, gradient_accumulation_steps=1,
        num_generations=task.num_generations, max_completion_length=task.max_completion_length,
        temperature=task.temperature, top_p=1.0, top_k=0,
        learning_rate=task.learning_rate, lr_scheduler_type="linear", max_steps=task.max_steps,
        adam_beta2=task.adam_beta2, max_grad_norm=task.max_grad_norm,
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left"),
        reward_funcs=reward,
        args=settings,
        train_dataset=dataset_of(training_problems),
        callbacks=[rows],
    ).train()


def dataset_of(training_problems: list[Problem]) -> Dataset:
    """The problems in TRL's format."""
    return Dataset.from_list(
        [{"prompt": chat(problem), "answer": problem.answer} for problem in training_problems]
    )


if __name__ == "__main__":
    main()
