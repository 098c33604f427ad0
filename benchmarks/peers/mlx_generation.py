"""Sampling with the engine mlx, as a process that bin/bench controls.

Arguments: folder of the model, maximum length of a sequence. The protocol is that of
vllm_generation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.generation import completed
from peralta_zmq import models, registry
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Request, Sampling


def main() -> None:
    """Load the model and do jobs until the standard input ends."""
    folder, max_length = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write messages to the standard output
    models.use_threads()
    settings = EngineSettings(
        device="cpu", dtype="bfloat16", slots=32, max_model_len=int(max_length)
    )
    engine = registry.resolve("engine", "mlx").open(Path(folder), settings)
    vars(engine)["_end_ids"] = []  # only lengths end completions
    print(file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = Sampling(
            temperature=job["temperature"],
            top_p=job["top_p"],
            top_k=job["top_k"],
            max_completion_length=job["tokens"],
        )
        prompts = [
            np.array(ids, np.int32) for ids in job["prompts"] for _ in range(job["completions"])
        ]
        requests = [Request(index, prompt, sampling) for index, prompt in enumerate(prompts)]
        started = time.perf_counter()
        completions = completed(engine, requests)
        seconds = time.perf_counter() - started
        assert {len(completion.token_ids) for completion in completions} == {job["tokens"]}
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
