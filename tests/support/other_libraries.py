"""Logprobs of IDS after the first one, in fp32, by transformers, mlx-lm or vLLM.

python tests/support/other_libraries.py LIBRARY FOLDER... prints a line of JSON for each folder: its
`logprobs`, or the `reason` why the library does not load it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

IDS = [3 + 89 * index % 465 for index in range(60)]  # exceeds WINDOW and ORIGINAL of families.py


def transformers(folder: str) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [logprobs[index, token].item() for index, token in enumerate(IDS[1:])]


def mlx(folder: str) -> list[float]:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model = load_model(Path(folder))[0]
    model.set_dtype(mx.float32)
    logits = model(mx.array([IDS]))[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [logprobs[index, token].item() for index, token in enumerate(IDS[1:])]


def vllm(folder: str) -> list[float]:
    from vllm import LLM, SamplingParams

    cache = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 128}
    llm = LLM(folder, dtype="float32", enforce_eager=True, generation_config="vllm", **cache)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": IDS}], sampling, use_tqdm=False)
    pairs = zip(IDS[1:], output.prompt_logprobs[1:], strict=True)
    return [logprobs[token].logprob for token, logprobs in pairs]


if __name__ == "__main__":
    library = {"transformers": transformers, "mlx": mlx, "vllm": vllm}[sys.argv[1]]
    for folder in sys.argv[2:]:
        try:
            result: dict[str, object] = {"logprobs": library(folder)}
        except Exception as error:  # noqa: BLE001  (of any kind)
            result = {"reason": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps({"folder": folder, **result}), flush=True)
