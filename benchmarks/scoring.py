"""Scoring: groups per second with slow rewards, against calls in the sampling process.

The native engine with the Qwen3-0.6B shape and random weights in 32 slots; prompts of 110 tokens
(90 of them common), 4 completions each, of 8 to 48 tokens. The reward of a completion sleeps for
0.2 s, or computes for 50 ms. Its peer is called in the sampling process, one completion at a time
(REWARD_IS_BOUNDED), while the engine waits. `engine_alone` scores nothing. `--quick` uses a shape a
tenth as large and fewer groups.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import generation, slow_rewards
from benchmarks.generation import LENGTHS, NUM_NEW, NUM_PROMPT, SAMPLING, SIBLINGS
from benchmarks.harness import Claim, bounded, compared, interleaved, progress, spread
from peralta_zmq import models
from peralta_zmq.engines import generate_groups
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalRewards, NoRewards, RewardPool
from peralta_zmq.rollout import Completion, Problem, Request, Sampling, Score

SLOTS = 32
NUM_GROUPS, QUICK_GROUPS = 24, 16  # more than the slots hold
WAITING_WORKERS = 16  # for rewards that sleep, which need no core
IDLE_SECONDS = 0.002  # as in generator/loop.py
REQUIRED = {"sleeps_share": 0.9, "computes_share": 0.9}
Reward = Callable[[Problem, str], float]


def run(*, quick: bool) -> Iterator[Claim]:
    """Measure all claims of this bench."""
    models.keep_memory()
    cores = models.use_threads()
    setting = Setting(quick=quick)
    progress("warming up")
    setting.alone()
    yield from claims(interleaved(setting.variants(), repeats=1 if quick else 3), cores=cores)


def claims(rates: dict[str, list[float]], *, cores: int) -> Iterator[Claim]:
    """The claims from the groups per second of each variant.

    The bound is the smaller of two rates: that of the engine alone, and that at which the workers
    can score. Rewards that compute have the cores that the engine leaves over at this rate.
    """
    alone = rates["alone"]
    yield Claim(
        "engine_alone", statistics.median(alone), "groups/s", n=len(alone), spread=spread(alone)
    )
    sleep_seconds = SIBLINGS * slow_rewards.SLEEP_SECONDS
    cpu_seconds = SIBLINGS * slow_rewards.CPU_SECONDS
    bounds = {
        "sleeps": [min(rate, WAITING_WORKERS / sleep_seconds) for rate in alone],
        "computes": [1 / (1 / rate + cpu_seconds / cores) for rate in alone],
    }
    for name, bound in bounds.items():
        in_process = rates[f"{name}_in_process"]
        yield compared(f"{name}_vs_in_process", rates[name], in_process, "groups/s")
        yield bounded(f"{name}_share", rates[name], bound, "groups/s")


class Setting:
    """The engine, the problems, and the lengths of their completions."""

    def __init__(self, *, quick: bool) -> None:
        shape = generation.QUICK_SHAPE if quick else generation.SHAPE
        num_groups = QUICK_GROUPS if quick else NUM_GROUPS
        self._tokenizer = models.load_tokenizer(models.EMBEDDED)
        dtype, _ = models.choose_dtype(torch.device("cpu"))
        native = NativeEngine(
            generation.endless_model(shape).to(dtype), self._tokenizer, slots=SLOTS,
            max_model_len=NUM_PROMPT + NUM_NEW,
        )  # fmt: skip
        native._end_ids = []  # pyright: ignore[reportPrivateUsage]  only lengths end completions
        random = np.random.default_rng(1)
        lengths = random.integers(*LENGTHS, size=num_groups * SIBLINGS, endpoint=True).tolist()
        self._engine = EngineWithLengths(native, lengths)
        self._problems = [
            Problem(str(number), "scoring", (), "", input_token_ids=tuple(prompt.tolist()))
            for number, prompt in enumerate(generation.prompts(num_groups))
        ]

    def variants(self) -> dict[str, Callable[[], float]]:
        """Groups per second of each variant."""
        sleeps, computes = slow_rewards.sleeps, slow_rewards.computes
        return {
            "alone": self.alone,
            "sleeps": lambda: self.in_workers(sleeps, WAITING_WORKERS),
            "sleeps_in_process": lambda: self.in_process(sleeps),
            "computes": lambda: self.in_workers(computes, models.available_cores()),
            "computes_in_process": lambda: self.in_process(computes),
        }

    def alone(self) -> float:
        """Sampling without rewards."""
        return self._rate(NoRewards())

    def in_process(self, reward: Reward) -> float:
        """Each reward is called while the engine waits."""
        return self._scored([RewardFunction(reward, is_bounded=True)], num_workers=1)

    def in_workers(self, reward: Reward, num_workers: int) -> float:
        """Rewards are called in workers while the engine samples."""
        return self._scored([RewardFunction(reward)], num_workers=num_workers)

    def _scored(self, functions: Sequence[RewardFunction], *, num_workers: int) -> float:
        pool = RewardPool(
            num_workers=num_workers, concurrency=1, timeout_seconds=10.0, queue_limit=SLOTS
        )
        with closing(pool):
            rewards = LocalRewards(functions, pool)
            rewards.score(self._problems[0], [""] * num_workers, []).result()  # starts the workers
            return self._rate(rewards)

    def _rate(self, rewards: LocalRewards | NoRewards) -> float:
        """Groups per second until the last one is scored."""
        scores: list[Future[list[Score]]] = []
        num_started = 0

        def problems() -> Iterator[Problem | None]:
            nonlocal num_started
            for problem in self._problems:
                while not rewards.has_room:
                    if num_started == len(scores):  # the engine has no group
                        time.sleep(IDLE_SECONDS)
                    yield None
                num_started += 1
                yield problem

        def score(problem: Problem, completions: list[Completion]) -> None:
            texts = [completion.text for completion in completions]
            token_ids = [completion.token_ids.tolist() for completion in completions]
            scores.append(rewards.score(problem, texts, token_ids))

        started = time.perf_counter()
        generate_groups(
            self._engine, self._tokenizer, problems(), score,
            num_generations=SIBLINGS, sampling=SAMPLING,
        )  # fmt: skip
        wait(scores)
        seconds = time.perf_counter() - started
        assert all(len(future.result()) == SIBLINGS for future in scores)
        return len(scores) / seconds


class EngineWithLengths:
    """The native engine with a length for each completion."""

    def __init__(self, engine: NativeEngine, lengths: Sequence[int]) -> None:
        self._engine, self._lengths = engine, lengths
        self.step, self.max_model_len = engine.step, engine.max_model_len
        self.apply, self.cancel = engine.apply, engine.cancel

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield each completion when it ends."""

        def with_lengths() -> Iterator[Any]:
            for request in requests:
                length = None if request is None else self._lengths[request.index]
                yield request and replace(request, max_completion_length=length)

        return self._engine.generate(with_lengths(), sampling, between_steps)
