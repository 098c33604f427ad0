"""Generation: the native engine against batched transformers and the original program.

A model with the Qwen3-0.6B shape and random weights; prompts of 110 tokens (90 of them common, as
with a system prompt and a worked example), 4 completions each, 48 new tokens or 8 to 48. `--quick`
uses a shape a tenth as large. The original samples one prompt at a time in fp32 and computes the
logprobs in a second forward; batched transformers returns no logprobs.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig

from benchmarks.harness import (
    REPO,
    Claim,
    bounded,
    compared,
    interleaved,
    progress,
    seconds,
)
from benchmarks.limits import bandwidth_meter, flops
from benchmarks.peers import environment
from benchmarks.training import QUICK_SHAPE, SHAPE
from peralta_zmq import models
from peralta_zmq.engines import hf_engine
from peralta_zmq.engines.native.decoder import Decoder
from peralta_zmq.engines.native.kernels import gemm
from peralta_zmq.engines.native.native_engine import CachedRows, native_engine
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS
from peralta_zmq.engines.row_engine import RowEngine, Rows
from peralta_zmq.environments import calculator
from peralta_zmq.models.logprobs import logprobs_and_entropies
from peralta_zmq.registry import Engine, EngineSettings
from peralta_zmq.rollout import Completion, Int32Array, Request, Sampling
from tools.base_model import new_model

SLOTS = 32
NUM_PROMPT, NUM_COMMON, NUM_NEW, SIBLINGS = 110, 90, 48, 4
LENGTHS = (8, NUM_NEW)  # range of the varying lengths, uniform
NUM_STEPS = 12  # tokens of a short round, the middle ones of NUM_NEW; 11 of its steps are timed
# The sampling of the original program.
SAMPLING = Sampling(temperature=0.7, top_p=0.95, top_k=40, max_completion_length=NUM_NEW)
CPU = torch.device("cpu")
REQUIRED = {
    "native_8x4_vs_original": 30.0, "native_varied_vs_original_varied": 40.0,
    "native_tiny_vs_hf_batched": 4.0, "native_8x4_vs_vllm": 2.0,
    "roofline_share_4_rows": 0.7, "roofline_share_32_rows": 0.5,
}  # fmt: skip


def run(*, quick: bool, device: torch.device = CPU) -> Iterator[Claim]:
    models.keep_memory()
    models.use_threads()
    setting = Setting(QUICK_SHAPE if quick else SHAPE, device)
    progress("warming up")
    setting.original(4)
    setting.hf_batched(1, 4)
    completed(setting.native, requests(1, 4))
    yield from against_peers(interleaved(variants(setting), repeats=1 if quick else 3))
    if device == CPU and not quick:
        yield against_vllm(setting)
    elif device != CPU:
        progress("without vLLM, which is installed for the CPU only")
    rounds = 3 if quick else 7
    yield from against_bounds(setting, rounds)
    yield from against_onednn(setting, rounds)
    del setting
    yield tiny(repeats=rounds, device=device)


class Setting:
    """The same weights three times: in fp32 for the original, twice in the engine's dtype."""

    def __init__(self, shape: dict[str, Any], device: torch.device = CPU) -> None:
        tokenizer = models.load_tokenizer(models.EMBEDDED)
        self.device, (self.dtype, _) = device, models.choose_dtype(device)
        self.plain = endless_model(shape).to(device)
        self.hf = copy.deepcopy(self.plain).to(self.dtype)
        own = copy.deepcopy(self.hf)
        self.num_parameters = sum(each.numel() for each in models.weights_of(own).values())
        length = NUM_PROMPT + NUM_NEW
        decoder = Decoder(own, num_rows=SLOTS + PROMPT_ROWS, capacity=length)
        self.rows = CachedRows(decoder, num_rows=SLOTS, max_kept=0)
        # Without end tokens: only lengths end completions.
        self.native = RowEngine(self.rows, Rows(SLOTS, tokenizer, [], max_model_len=length))

    def original(self, num_new: int) -> float:
        """Seconds of one prompt x 4 in fp32, then a second forward for the logprobs."""

        @torch.inference_mode()
        def work() -> None:
            sequences = generated(self.plain, 1, num_new)
            token_logprobs(self.plain, sequences)

        return seconds(work)

    def hf_batched(self, num_prompts: int, num_new: int) -> float:
        """Seconds of transformers' generate on all prompts x 4 together, without logprobs."""
        with torch.inference_mode():
            return seconds(lambda: generated(self.hf, num_prompts, num_new))

    def ours(self, num_prompts: int, num_new: int | Sequence[int] = NUM_NEW) -> float:
        """Tokens per second of the native engine, without a prefix cache from earlier calls."""
        batch = requests(num_prompts, num_new)
        self.rows.invalidate()
        started = time.perf_counter()
        completions = completed(self.native, batch)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        assert num_tokens == sum(request.sampling.max_completion_length for request in batch)
        return num_tokens / seconds

    def step(self, num_prompts: int) -> float:
        """Median seconds of a decode step with 4 rows per prompt."""
        times: list[float] = []
        self._decode(num_prompts, lambda: times.append(time.perf_counter()))
        return statistics.median(after - before for before, after in pairwise(times))

    def _decode(self, num_prompts: int, between_steps: Callable[[], None]) -> None:
        batch = requests(num_prompts, NUM_STEPS, longer=(NUM_NEW - NUM_STEPS) // 2)
        completed(self.native, batch, between_steps)


def completed(
    engine: Engine, batch: Sequence[Request], between_steps: Callable[[], None] = lambda: None
) -> list[Completion]:
    waiting, completions = deque(batch), list[Completion]()
    while len(completions) < len(batch):
        engine.submit([waiting.popleft() for _ in range(min(engine.num_free(), len(waiting)))])
        completions += engine.advance()
        between_steps()
    return completions


def token_logprobs(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Logprob of each token given those before it, [B, T - 1], from a whole forward pass."""
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
    return logprobs_and_entropies(logits, token_ids[:, 1:], with_entropy=False)[0]


def endless_model(shape: dict[str, Any]) -> Any:
    model = cast(Any, new_model(shape, seed=0).eval())
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def prompts(count: int, longer: int = 0) -> list[Int32Array]:
    """Prompts with a common prefix, `longer` tokens longer than NUM_PROMPT."""
    random = np.random.default_rng(0)
    common = random.integers(3, 30000, NUM_COMMON)
    suffixes = random.integers(3, 30000, (count, NUM_PROMPT + longer - NUM_COMMON))
    return [np.concatenate([common, suffix]).astype(np.int32) for suffix in suffixes]


def requests(num_prompts: int, num_new: int | Sequence[int], longer: int = 0) -> list[Request]:
    """Four requests per prompt, of one length or with a length each."""
    arrays = [prompt for prompt in prompts(num_prompts, longer) for _ in range(SIBLINGS)]
    lengths = [num_new] * len(arrays) if isinstance(num_new, int) else num_new
    return [
        Request(index, array, replace(SAMPLING, max_completion_length=length))
        for index, (array, length) in enumerate(zip(arrays, lengths, strict=True))
    ]


def generated(model: Any, num_prompts: int, num_new: int) -> torch.Tensor:
    """Prompts and completions, [4 * num_prompts, NUM_PROMPT + num_new]."""
    ids = torch.from_numpy(np.stack(prompts(num_prompts))).long().repeat_interleave(SIBLINGS, 0)
    ids = ids.to(model.device)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=SAMPLING.temperature,
        top_p=SAMPLING.top_p, top_k=SAMPLING.top_k, max_new_tokens=num_new,
    )  # fmt: skip


def varying_lengths() -> dict[str, list[int]]:
    """New tokens of each completion for each program in the variant with varying lengths.

    The native engine samples 32 groups, four times as many as its slots hold, so that most of the
    time slots are refilled; transformers the first 16 of them, the original the first four.
    """
    random = np.random.default_rng(1)
    lengths = random.integers(*LENGTHS, size=32 * SIBLINGS, endpoint=True).tolist()
    return {"ours": lengths, "hf": lengths[: 16 * SIBLINGS], "original": lengths[: 4 * SIBLINGS]}


def variants(setting: Setting) -> dict[str, Callable[[], float]]:
    """Tokens per second of each program, prompts included.

    With varying lengths, programs that cannot refill compute up to the longest completion of a
    batch (transformers 8 groups, the original one); only the requested tokens count.
    """
    lengths_of = varying_lengths()

    def batched(name: str, num_groups: int, measure: Callable[[int], float]) -> float:
        lengths, size = lengths_of[name], num_groups * SIBLINGS
        batches = (lengths[first : first + size] for first in range(0, len(lengths), size))
        return sum(lengths) / sum(measure(max(batch)) for batch in batches)

    return {
        "original": lambda: SIBLINGS * NUM_NEW / setting.original(NUM_NEW),
        "original_varied": lambda: batched("original", 1, setting.original),
        "hf_8x4": lambda: 32 * NUM_NEW / setting.hf_batched(8, NUM_NEW),
        "hf_varied": lambda: batched("hf", 8, functools.partial(setting.hf_batched, 8)),
        "native_1x4": lambda: setting.ours(1),
        "native_8x4": lambda: setting.ours(8),
        "native_varied": lambda: setting.ours(32, lengths_of["ours"]),
    }


def against_peers(rates: dict[str, list[float]]) -> Iterator[Claim]:
    for name, ours, peer in (
        ("native_1x4_vs_original", "native_1x4", "original"),
        ("native_8x4_vs_original", "native_8x4", "original"),
        ("native_varied_vs_original", "native_varied", "original"),
        ("native_varied_vs_original_varied", "native_varied", "original_varied"),
        ("native_8x4_vs_hf_batched", "native_8x4", "hf_8x4"),
        ("native_varied_vs_hf_batched_varied", "native_varied", "hf_varied"),
    ):
        yield compared(name, rates[ours], rates[peer], "tokens/s")


class PeerProcess:
    """A process that samples with the weights in a folder; used with `closing`.

    `module` of benchmarks.peers runs with the arguments and the maximum length of a sequence.
    """

    def __init__(self, interpreter: Path, module: str, *arguments: str) -> None:
        command = [str(interpreter), "-m", f"benchmarks.peers.{module}"]
        self._process = subprocess.Popen(
            [*command, *arguments, str(NUM_PROMPT + NUM_NEW)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            cwd=REPO,
        )  # fmt: skip
        self._read_line()

    def rate(self, num_prompts: int, num_new: int = NUM_NEW) -> float:
        job = {
            "prompts": [prompt.tolist() for prompt in prompts(num_prompts)],
            "completions": SIBLINGS, "tokens": num_new, "temperature": SAMPLING.temperature,
            "top_p": SAMPLING.top_p, "top_k": SAMPLING.top_k,
        }  # fmt: skip
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return num_prompts * SIBLINGS * num_new / float(self._read_line())

    def close(self) -> None:
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self._process.wait()}")
        return line


def against_vllm(setting: Setting, repeats: int = 3) -> Claim:
    """The native engine alternating with vLLM on the CPU, eager and compiled; the better counts."""
    rates: list[dict[str, list[float]]] = []
    with TemporaryDirectory() as folder:
        setting.hf.save_pretrained(folder)
        for mode in ("eager", "compiled"):
            interpreter = environment.vllm_python()
            with closing(PeerProcess(interpreter, "vllm_generation", folder, mode)) as vllm:
                vllm.rate(8)  # warms up
                measures = {"ours": lambda: setting.ours(8), "vllm": lambda: vllm.rate(8)}
                rates.append(interleaved(measures, repeats=repeats))
    best = max(rates, key=lambda rate: statistics.median(rate["vllm"]))
    return compared("native_8x4_vs_vllm", best["ours"], best["vllm"], "tokens/s")


def peers() -> dict[str, str]:
    return environment.vllm_version()


def against_bounds(setting: Setting, rounds: int) -> Iterator[Claim]:
    """Decode steps against the machine's memory bandwidth and arithmetic throughput, measured just
    before and after each round.
    """
    size = setting.num_parameters * setting.dtype.itemsize  # tied: the head is the embedding
    read = bandwidth_meter(size, setting.device)
    per_token = 2 * setting.num_parameters  # operations
    for num_prompts in (1, 2, 4, 8):
        rows = num_prompts * SIBLINGS

        def bound(rows: int = rows) -> float:
            # Some CPUs multiply float32 faster than bfloat16.
            dtypes = {setting.dtype, torch.float32} if setting.device == CPU else {setting.dtype}
            fastest = max(flops(dtype, setting.device) for dtype in dtypes)
            return min(rows * read() / size, fastest / per_token)  # reading, multiplying

        rates: list[float] = []
        bounds: list[float] = []
        for _ in range(rounds):
            step, limit = with_bound(bound, functools.partial(setting.step, num_prompts))
            rates.append(rows / step)
            bounds.append(limit)
            progress(f"{rows} rows: {rows / step:.4g} of {limit:.4g} tokens/s")
        yield bounded(f"roofline_share_{rows}_rows", rates, bounds, "tokens/s")


def with_bound(bound: Callable[[], float], work: Callable[[], float]) -> tuple[float, float]:
    """The result of `work`, and the mean of the bound before and after it.

    The bandwidth available on a shared machine changes within minutes.
    """
    before = bound()
    step = work()
    return step, statistics.fmean((before, bound()))


def against_onednn(setting: Setting, rounds: int) -> Iterator[Claim]:
    """Matmuls with all weights in the memory order used here, alternating with oneDNN's order."""
    if setting.device != CPU or not gemm.can_pack(setting.dtype):
        return
    layers = [layer for layer in setting.hf.modules() if isinstance(layer, torch.nn.Linear)]
    with torch.inference_mode():
        packed = [gemm.pack(layer.weight) for layer in layers]
        onednn = [gemm.OnednnWeight(layer.weight) for layer in layers]

    @torch.inference_mode()
    def rate(weights: Sequence[gemm.PackedWeight], rows: int) -> float:
        inputs = [torch.ones(rows, layer.in_features, dtype=setting.dtype) for layer in layers]
        pairs = list(zip(weights, inputs, strict=True))
        return rows / seconds(lambda: [weight.multiply(batch, None) for weight, batch in pairs])

    for rows in (SIBLINGS, 8 * SIBLINGS):
        orders = {"ours": packed, "oneDNN": onednn}
        measures = {name: functools.partial(rate, order, rows) for name, order in orders.items()}
        for warm_up in measures.values():
            warm_up()
        rates = interleaved(measures, repeats=rounds)
        name = f"products_vs_onednn_{rows}_rows"
        yield compared(name, rates["ours"], rates["oneDNN"], "tokens/s")


def tiny(*, repeats: int, device: torch.device) -> Claim:
    """The embedded model on its own task: 24 groups of 8 in 32 slots."""
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    dtype, _ = models.choose_dtype(device)
    batch = [
        Request(index, np.array(models.chat_prompt(tokenizer, problem.messages), np.int32))
        for index, problem in enumerate(
            problem for problem in islice(calculator.problems("train", 0), 24) for _ in range(8)
        )
    ]
    rates: dict[str, Callable[[], float]] = {}
    for name, new_engine in (("native", native_engine), ("hf", hf_engine.open_live)):
        model = models.load_model(models.EMBEDDED, device=device, dtype=dtype)
        engine = new_engine(model, tokenizer, EngineSettings())
        rates[name] = functools.partial(rate, engine, batch)
        rates[name]()
    results = interleaved(rates, repeats=repeats)
    ours, peer = results["native"], results["hf"]
    return compared("native_tiny_vs_hf_batched", ours, peer, "rollouts/s")


def rate(engine: Engine, batch: Sequence[Request]) -> float:
    return len(batch) / seconds(lambda: completed(engine, batch))
