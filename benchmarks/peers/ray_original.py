"""The original's two actors on Ray, made again from its description: github.com/kahnvex/peralta.

One generator actor (transformers' generate of one prompt at a time, in fp32, then a second forward
for the logprobs), one trainer actor (padded rollouts, logits at every position, REINFORCE over the
group's mean, Adam), four threads that ask the generator and fill a queue of one batch, groups
without signal left out, and after each step save_pretrained and from_pretrained through a folder.
Each row has the seconds of every part; `..._meanwhile` is what the generator did at the same time.
Knows Ray; knows nothing of our trainer.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import random
import shutil
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import ray
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.task import Task, asked, chat, problems, say
from peralta_zmq.environments import calculator

NUM_WORKERS = 4  # threads that ask one generator
WEIGHTS = "model.safetensors"
Rollout = tuple[torch.Tensor, int, float]  # tokens [T], of which the prompt, advantage


@ray.remote
class Generator:
    """Samples with the newest checkpoint that it was told to load."""

    def __init__(self, task: Task) -> None:
        self.task, self.seconds = task, {"generate": 0.0, "score": 0.0}
        torch.manual_seed(task.seed)
        self.load(task.model)

    def generate(self, prompt: list[int]) -> list[list[int]]:
        """Completions of one prompt, each up to and with its end."""
        began = time.perf_counter()
        ids = torch.tensor([prompt] * self.task.num_generations)
        with torch.no_grad():
            full = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True,
                max_new_tokens=self.task.max_completion_length,
                temperature=self.task.temperature, top_p=1.0, top_k=0,
            )  # fmt: skip
            sampled = time.perf_counter()
            logprobs_of(self.model, full)
        self.seconds["generate"] += sampled - began
        self.seconds["score"] += time.perf_counter() - sampled
        return [until_end(each, self.ends) for each in full[:, len(prompt) :].tolist()]

    def load(self, folder: str) -> float:
        """Seconds that it took to have the model anew."""
        began = time.perf_counter()
        self.model = None
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends = {self.model.generation_config.eos_token_id}
        return time.perf_counter() - began

    def taken(self) -> dict[str, float]:
        """Seconds of each part since it was last asked."""
        taken, self.seconds = self.seconds, {"generate": 0.0, "score": 0.0}
        return taken


@ray.remote
class Trainer:
    """Learns from whole batches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=task.learning_rate, betas=(0.9, task.adam_beta2)
        )

    def step(self, step: int, rollouts: list[Rollout]) -> float:
        """One step of the optimizer; the seconds that it took."""
        began = time.perf_counter()
        tokens = pad_sequence([each for each, _, _ in rollouts], batch_first=True)
        places = torch.arange(tokens.shape[1])
        starts = torch.tensor([start for _, start, _ in rollouts])[:, None]
        ends = torch.tensor([len(each) for each, _, _ in rollouts])[:, None]
        mask = ((places >= starts) & (places < ends))[:, 1:]
        worth = torch.tensor([each for _, _, each in rollouts])[:, None]
        logprobs = logprobs_of(self.model, tokens, attention=(places < ends).long())
        loss = -(logprobs * worth * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.learning_rate * (1 - step / self.task.max_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def save(self, folder: str) -> float:
        """Seconds of writing a checkpoint."""
        began = time.perf_counter()
        self.model.save_pretrained(folder)
        return time.perf_counter() - began


def logprobs_of(
    model: Any, tokens: torch.Tensor, attention: torch.Tensor | None = None
) -> torch.Tensor:
    """Of every token but the first, [B, T - 1], without temperature; gathered as TRL does."""
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
    chosen = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen - torch.stack([each.logsumexp(-1) for each in logits])


def until_end(token_ids: list[int], ends: set[int]) -> list[int]:
    """Without what was padded behind the first end."""
    at = [place for place, each in enumerate(token_ids) if each in ends]
    return token_ids[: at[0] + 1] if at else token_ids


class Batcher:
    """Threads that ask, pay and queue."""

    def __init__(self, task: Task, generator: Any) -> None:
        self.task, self.generator = task, generator
        self.tokenizer = AutoTokenizer.from_pretrained(task.model)
        self.problems = problems(task)
        self.queue: Queue[Rollout] = Queue(maxsize=task.batch_size)
        self.rewards: list[float] = []
        for number in range(NUM_WORKERS):
            threading.Thread(target=self.produce, args=(number,), daemon=True).start()

    def produce(self, number: int) -> None:
        """Ask for one problem after another, for ever."""
        chance = random.Random(1000 * self.task.seed + number)
        while True:
            problem = chance.choice(self.problems)
            text = self.tokenizer.apply_chat_template(
                chat(problem), tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            prompt = self.tokenizer.encode(text, add_special_tokens=False)
            said = ray.get(self.generator.generate.remote(prompt))
            paid = [calculator.reward(problem, self.text_of(each)) for each in said]
            self.rewards += paid
            if len(set(paid)) == 1:
                continue  # no signal
            mean = sum(paid) / len(paid)
            for each, reward in zip(said, paid, strict=True):
                self.queue.put((torch.tensor(prompt + each), len(prompt), reward - mean))

    def text_of(self, token_ids: list[int]) -> str:
        """What is paid."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def batch(self) -> tuple[list[Rollout], list[float]]:
        """The next batch, and what everything sampled since the last one was paid."""
        rollouts = [self.queue.get() for _ in range(self.task.batch_size)]
        rewards, self.rewards = self.rewards, []
        return rollouts, rewards


def main() -> None:
    """Train until somebody ends us, or to max_steps."""
    task = asked()
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20,
        _temp_dir=f"{task.folder}/ray",
    )  # fmt: skip
    trainer, generator = Trainer.remote(task), Generator.remote(task)
    ray.get([trainer.__ray_ready__.remote(), generator.__ray_ready__.remote()])
    batcher = Batcher(task, generator)
    say(begun=True)
    for step in range(task.max_steps):
        folder, asked_at = Path(task.folder) / f"step_{step:03d}", time.perf_counter()
        rollouts, rewards = batcher.batch()
        began = time.perf_counter()
        parts = {"wait": began - asked_at, "train": ray.get(trainer.step.remote(step, rollouts))}
        parts["transfer"] = time.perf_counter() - began - parts["train"]
        parts["publish"] = ray.get(trainer.save.remote(str(folder)))
        parts["reload"] = ray.get(generator.load.remote(str(folder)))
        taken = ray.get(generator.taken.remote())
        parts |= {f"{name}_meanwhile": each for name, each in taken.items()}
        size = (folder / WEIGHTS).stat().st_size
        say(step=step + 1, reward=sum(rewards) / len(rewards), rollouts=len(rewards),
            bytes=size, seconds=parts)  # fmt: skip
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
