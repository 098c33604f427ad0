"""Sampling with vLLM on the CPU, as a process that bin/bench controls.

Arguments: folder of the model, "eager" or "compiled", maximum length of a sequence. After loading,
writes an empty line. Then, for each job, a line of JSON on the standard input, writes its seconds.
Fields of a job: `prompts`, lists of token ids; `completions` per prompt; `tokens` of a completion;
`temperature`; `top_p`; `top_k`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

OPTIONS = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
}  # fmt: skip


def main() -> None:
    folder, mode, max_length = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write messages to the standard output
    cores = f"0-{(os.cpu_count() or 1) - 1}"  # by default vLLM leaves one to its other process
    os.environ.update(OPTIONS, VLLM_CPU_OMP_THREADS_BIND=cores)
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm: Any = LLM(
        folder, dtype="bfloat16", enforce_eager=mode == "eager", max_model_len=int(max_length),
        max_num_seqs=32, skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    print(file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = SamplingParams(
            n=job["completions"], temperature=job["temperature"], top_p=job["top_p"],
            top_k=job["top_k"], max_tokens=job["tokens"], ignore_eos=True, logprobs=0,
            detokenize=False,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        lengths = {len(each.token_ids) for output in outputs for each in output.outputs}
        assert lengths == {job["tokens"]}
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
