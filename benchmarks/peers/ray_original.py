"""The original's two actors on Ray, reimplemented from its description: github.com/kahnvex/peralta.

A generator actor (transformers' generate for one prompt at a time in fp32, then a second forward
pass for the logprobs), a trainer actor (padded rollouts, logits at every position, REINFORCE with
the group's mean as baseline, Adam), and four threads that request groups from the generator and
fill a queue of one batch. Groups without signal are left out. After each step the weights pass
through a folder with save_pretrained and from_pretrained.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import random
import shutil
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import ray
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.task import Task, chat, environment, problems, read_task, report

NUM_WORKERS = 4  # threads that send requests to the generator
WEIGHTS = "model.safetensors"
Rollout = tuple[torch.Tensor, int, float]  # tokens [T], length of the prompt, advantage


@ray.remote
class Generator:
    """Samples with the newest checkpoint that it has loaded."""

    def __init__(self, task: Task) -> None:
        self.task = task
        torch.manual_seed(task.seed)
        self.load(task.model)

    def generate(self, prompt: list[int]) -> list[list[int]]:
        """Completions of one prompt, each including its end token."""
        ids = torch.tensor([prompt] * self.task.num_generations)
        with torch.no_grad():
            full = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True,
                max_new_tokens=self.task.max_completion_length,
                temperature=self.task.temperature, top_p=1.0, top_k=0,
            )  # fmt: skip
            logprobs_of(self.model, full)
        return [until_end(row, self.ends) for row in full[:, len(prompt) :].tolist()]

    def load(self, folder: str) -> None:
        self.model = None
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends = {self.model.generation_config.eos_token_id}


@ray.remote
class Trainer:
    """Takes one training step per batch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=task.learning_rate, betas=(0.9, task.adam_beta2)
        )

    def step(self, step: int, rollouts: list[Rollout]) -> None:
        tokens = pad_sequence([token_ids for token_ids, _, _ in rollouts], batch_first=True)
        positions = torch.arange(tokens.shape[1])
        starts = torch.tensor([start for _, start, _ in rollouts])[:, None]
        ends = torch.tensor([len(token_ids) for token_ids, _, _ in rollouts])[:, None]
        mask = ((positions >= starts) & (positions < ends))[:, 1:]
        advantages = torch.tensor([advantage for _, _, advantage in rollouts])[:, None]
        logprobs = logprobs_of(self.model, tokens, attention=(positions < ends).long())
        loss = -(logprobs * advantages * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.learning_rate * (1 - step / self.task.max_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str) -> None:
        self.model.save_pretrained(folder)


def logprobs_of(
    model: Any, tokens: torch.Tensor, attention: torch.Tensor | None = None
) -> torch.Tensor:
    """Logprobs of all tokens but the first, [B, T - 1], without temperature; gathered as in TRL."""
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
    token_logits = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return token_logits - torch.stack([row.logsumexp(-1) for row in logits])


def until_end(token_ids: list[int], ends: set[int]) -> list[int]:
    """The tokens up to the first end token, without padding."""
    positions = [position for position, token in enumerate(token_ids) if token in ends]
    return token_ids[: positions[0] + 1] if positions else token_ids


class Batcher:
    def __init__(self, task: Task, generator: Any) -> None:
        self.task, self.generator = task, generator
        self.tokenizer = AutoTokenizer.from_pretrained(task.model)
        self.problems = problems(task)
        self.reward = environment(task).reward
        self.queue: Queue[Rollout] = Queue(maxsize=task.batch_size)
        self.rewards: list[float] = []
        for number in range(NUM_WORKERS):
            threading.Thread(target=self.produce, args=(number,), daemon=True).start()

    def produce(self, number: int) -> None:
        """Sample random problems without end."""
        randomness = random.Random(1000 * self.task.seed + number)
        while True:
            problem = randomness.choice(self.problems)
            text = self.tokenizer.apply_chat_template(
                chat(problem), tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            prompt = self.tokenizer.encode(text, add_special_tokens=False)
            completions = ray.get(self.generator.generate.remote(prompt))
            rewards = [self.reward(problem, self.text_of(ids)) for ids in completions]
            self.rewards += rewards
            if len(set(rewards)) == 1:
                continue  # no signal
            mean = sum(rewards) / len(rewards)
            for ids, reward in zip(completions, rewards, strict=True):
                self.queue.put((torch.tensor(prompt + ids), len(prompt), reward - mean))

    def text_of(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def batch(self) -> tuple[list[Rollout], list[float]]:
        """The next batch, and the rewards of everything sampled since the last one."""
        rollouts = [self.queue.get() for _ in range(self.task.batch_size)]
        rewards, self.rewards = self.rewards, []
        return rollouts, rewards


def main() -> None:
    task = read_task()
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20,
        _temp_dir=f"{task.folder}/ray",
    )  # fmt: skip
    trainer, generator = Trainer.remote(task), Generator.remote(task)
    ray.get([trainer.__ray_ready__.remote(), generator.__ray_ready__.remote()])
    batcher = Batcher(task, generator)
    report(started=True)
    for step in range(task.max_steps):
        folder = Path(task.folder) / f"step_{step:03d}"
        rollouts, rewards = batcher.batch()
        ray.get(trainer.step.remote(step, rollouts))
        ray.get(trainer.save.remote(str(folder)))
        ray.get(generator.load.remote(str(folder)))
        size = (folder / WEIGHTS).stat().st_size
        tokens = sum(len(token_ids) - start for token_ids, start, _ in rollouts)
        mean = sum(rewards) / len(rewards)
        report(step=step + 1, reward=mean, rollouts=len(rewards), tokens=tokens, bytes=size)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
