"""Generation: our engine, transformers' batched generate, and the original's way, side by side.

The Qwen3-0.6B shape with random weights, prompts of 110 tokens (90 of them common, as with a
system prompt and a worked example), 4 completions each, 48 new tokens or 8 to 48. `--quick` takes
a shape a tenth as large. The original samples one prompt at a time in fp32 and takes the logprobs
with a second forward; batched transformers gives no logprobs. On a GPU a step is a recording, so
that nothing tells its parts apart.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from benchmarks.harness import Claim, bounded, compared, interleaved, progress, seconds, spread
from benchmarks.limits import flops, reader
from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native import NativeEngine, decoder, linears
from peralta_zmq.engines.native.kernels import decode_layer, gemm
from peralta_zmq.environments import calculator
from peralta_zmq.rollout import Int32Array, Request, Sampling
from peralta_zmq.weights.tensors import MappedTensors, check_finite

NUM_PROMPT, NUM_COMMON, NUM_NEW, SIBLINGS = 110, 90, 48, 4
LENGTHS = (8, NUM_NEW)  # of the varied variant, uniform
NUM_STEPS = 12  # tokens of a short round, the middle ones of NUM_NEW; of its steps 10 are timed
SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
QUICK_SHAPE = {**SHAPE, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536,
               "vocab_size": 32000}  # fmt: skip
# as in the original's configuration
DRAWN = Sampling(temperature=0.7, top_p=0.95, top_k=40, max_completion_length=NUM_NEW)
TINY_GROUPS, TINY_SIBLINGS = 24, 8
MAX_STALL = 0.1  # seconds of the decode loop at newer weights, beyond the copy itself
CPU = torch.device("cpu")
REQUIRED = {
    "native_8x4_vs_original": 20.0, "native_varied_vs_original_varied": 30.0,
    "native_tiny_vs_hf_batched": 1.5, "bandwidth_share_4_rows": 0.5, "flop_share_32_rows": 0.5,
}  # fmt: skip


def run(*, quick: bool, device: torch.device = CPU) -> Iterator[Claim]:
    """Measure; the claims' names are those of the architecture."""
    models.keep_memory()
    models.use_threads()
    setting = Setting(QUICK_SHAPE if quick else SHAPE, device)
    progress("warming up")
    setting.original(4)
    setting.hf_batched(1, 4)
    list(setting.native.generate(requests(1, 4), DRAWN))
    yield from against_peers(interleaved(variants(setting), repeats=1 if quick else 3))
    rounds = 3 if quick else 7
    yield from against_bounds(setting, rounds)
    yield from against_copy(setting, rounds)
    yield from against_onednn(setting, rounds)
    del setting
    yield tiny(repeats=rounds, device=device)


class Step(NamedTuple):
    """Seconds of a decode step and of its parts."""

    whole: float
    products: float
    attention: float

    @property
    def rest(self) -> float:
        """Norms and what else is between the layers, the sampler."""
        return self.whole - self.products - self.attention


@dataclass(slots=True)
class Stopwatch:
    """Seconds counted so far."""

    seconds: float = 0.0


class Setting:
    """The same weights three times: fp32 as the original has them, and twice in our dtype."""

    def __init__(self, shape: dict[str, Any], device: torch.device = CPU) -> None:
        tokenizer = models.load_tokenizer(models.EMBEDDED)
        self.device, (self.dtype, _) = device, models.choose_dtype(device)
        self.plain = without_end(shape).to(device)
        self.hf = copy.deepcopy(self.plain).to(self.dtype)
        own = copy.deepcopy(self.hf)
        self.num_parameters = sum(each.numel() for each in models.weights_of(own).values())
        self.native = NativeEngine(own, tokenizer, slots=32, max_model_len=NUM_PROMPT + NUM_NEW)
        self.native._end_ids = []  # pyright: ignore[reportPrivateUsage]  lengths as planned

    def original(self, num_new: int) -> float:
        """Seconds of one prompt x 4 in fp32, then a second forward for the logprobs."""

        @torch.inference_mode()
        def work() -> None:
            sequences = generated(self.plain, 1, num_new)
            models.token_logprobs(self.plain, sequences, torch.ones_like(sequences))

        return seconds(work)

    def hf_batched(self, num_prompts: int, num_new: int) -> float:
        """Seconds of transformers' generate on all prompts x 4 together, without logprobs."""
        with torch.inference_mode():
            return seconds(lambda: generated(self.hf, num_prompts, num_new))

    def ours(self, num_prompts: int, num_new: int | Sequence[int] = NUM_NEW) -> float:
        """Tokens per second of our engine; the weights count as new, so no prefix is kept."""
        asked = requests(num_prompts, num_new)
        started = time.perf_counter()
        completions = list(self.native.generate(asked, DRAWN))
        seconds = time.perf_counter() - started
        num_made = sum(len(each.token_ids) for each in completions)
        assert num_made == sum(each.max_completion_length or 0 for each in asked)
        return num_made / seconds

    def step(self, num_prompts: int) -> Step:
        """The medians of decode steps with 4 rows for each prompt."""
        at: list[tuple[float, ...]] = []
        linear = (linears.PackedLinear, "forward"), (torch.nn.Linear, "forward")
        between = (decode_layer.CompiledLayerOps, "attend"), (decoder.TorchLayerOps, "attend")
        with timed(*linear) as products, timed(*between) as attention:
            self._decode(
                num_prompts,
                lambda: at.append((time.perf_counter(), products.seconds, attention.seconds)),
            )
        taken = np.diff(np.array(at), axis=0)
        return Step(*np.median(taken, axis=0).tolist())

    def step_by_torch(self, num_prompts: int) -> Step:
        """The same without decode_layer.c."""
        decoder = self.native._decoder  # pyright: ignore[reportPrivateUsage]
        assert decoder is not None
        attend, decoder._library = decoder._library, None  # pyright: ignore[reportPrivateUsage]
        try:
            return self.step(num_prompts)
        finally:
            decoder._library = attend  # pyright: ignore[reportPrivateUsage]

    def stall(self, staged: Mapping[str, torch.Tensor], *, looks: bool = False) -> float:
        """How many seconds longer a decode step takes before which newer weights come, and are
        looked through if not before."""
        at: list[float] = []

        def between_steps() -> None:
            at.append(time.perf_counter())
            if len(at) == NUM_STEPS // 2:
                if looks:
                    check_finite(staged)
                self.native.apply(staged, step=self.native.step + 1)

        self._decode(1, between_steps)
        steps = [after - before for before, after in pairwise(at)]
        return steps[NUM_STEPS // 2 - 1] - statistics.median(steps)

    def copy(self, staged: Mapping[str, torch.Tensor]) -> float:
        """Seconds of packing every matrix that is multiplied, one after another, and of copying
        the others into a model that is there; the head is the embedding, so it is both."""
        matrices = {
            f"{name}.weight" for name, module in self.hf.named_modules()
            if isinstance(module, torch.nn.Linear)
            and self.device == CPU and gemm.can_pack(self.dtype)
        }  # fmt: skip

        def work() -> None:
            for name, tensor in models.weights_of(self.hf).items():
                if name in matrices:
                    gemm.pack(staged[name])
                else:
                    tensor.copy_(staged[name])
            if matrices:
                gemm.pack(staged["model.embed_tokens.weight"])

        return seconds(work)

    def _decode(self, num_prompts: int, between_steps: Callable[[], None]) -> None:
        asked = requests(num_prompts, NUM_STEPS, longer=(NUM_NEW - NUM_STEPS) // 2)
        drawn = replace(DRAWN, max_completion_length=NUM_STEPS)
        list(self.native.generate(asked, drawn, between_steps))


@contextmanager
def timed(*functions: tuple[Any, str]) -> Generator[Stopwatch, None, None]:
    """What counts the seconds in these functions, by owner and name, while this lasts."""
    plain = [getattr(owner, name) for owner, name in functions]
    watch = Stopwatch()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **options)
            watch.seconds += time.perf_counter() - started
            return result

        return call

    for (owner, name), function in zip(functions, plain, strict=True):
        setattr(owner, name, counted(function))
    try:
        yield watch
    finally:
        for (owner, name), function in zip(functions, plain, strict=True):
            setattr(owner, name, function)


def without_end(shape: dict[str, Any]) -> Any:
    """A random model that never ends a completion."""
    model = cast(Any, models.new_model(shape, seed=0).eval())
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def prompts(count: int, longer: int = 0) -> list[Int32Array]:
    """Prompts whose first tokens are common, some tokens longer than elsewhere if asked for."""
    random = np.random.default_rng(0)
    common = random.integers(3, 30000, NUM_COMMON)
    rest = random.integers(3, 30000, (count, NUM_PROMPT + longer - NUM_COMMON))
    return [np.concatenate([common, each]).astype(np.int32) for each in rest]


def requests(num_prompts: int, num_new: int | Sequence[int], longer: int = 0) -> list[Request]:
    """Four for each prompt, of one length or of their own."""
    arrays = [each for each in prompts(num_prompts, longer) for _ in range(SIBLINGS)]
    lengths = [num_new] * len(arrays) if isinstance(num_new, int) else num_new
    return [
        Request(index, array, length)
        for index, (array, length) in enumerate(zip(arrays, lengths, strict=True))
    ]


def generated(model: Any, num_prompts: int, num_new: int) -> torch.Tensor:
    """Prompts and completions, [4 * num_prompts, NUM_PROMPT + num_new]."""
    ids = torch.from_numpy(np.stack(prompts(num_prompts))).long().repeat_interleave(SIBLINGS, 0)
    ids = ids.to(model.device)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=DRAWN.temperature,
        top_p=DRAWN.top_p, top_k=DRAWN.top_k, max_new_tokens=num_new,
    )  # fmt: skip


def planned() -> dict[str, list[int]]:
    """New tokens of each completion where lengths vary, by whose they are. Ours are of 32 groups,
    four for each that our slots hold: a generator's pace while it refills, with little of the end,
    when slots fall empty. Transformers' are of the first 16, the original's of the first four."""
    random = np.random.default_rng(1)
    lengths = random.integers(*LENGTHS, size=32 * SIBLINGS, endpoint=True).tolist()
    return {"ours": lengths, "hf": lengths[: 16 * SIBLINGS], "original": lengths[: 4 * SIBLINGS]}


def variants(setting: Setting) -> dict[str, Callable[[], float]]:
    """Tokens per second of each way, prompts included. Where lengths vary, whoever cannot refill
    computes up to the longest of a batch and is paid for the planned ones: transformers with 8
    groups together, the original with one."""
    plans = planned()

    def batched(name: str, num_groups: int, taking: Callable[[int], float]) -> float:
        lengths, size = plans[name], num_groups * SIBLINGS
        batches = (lengths[first : first + size] for first in range(0, len(lengths), size))
        return sum(lengths) / sum(taking(max(each)) for each in batches)

    return {
        "original": lambda: SIBLINGS * NUM_NEW / setting.original(NUM_NEW),
        "original_varied": lambda: batched("original", 1, setting.original),
        "hf_8x4": lambda: 32 * NUM_NEW / setting.hf_batched(8, NUM_NEW),
        "hf_varied": lambda: batched("hf", 8, functools.partial(setting.hf_batched, 8)),
        "native_1x4": lambda: setting.ours(1),
        "native_4x4": lambda: setting.ours(4),
        "native_8x4": lambda: setting.ours(8),
        "native_varied": lambda: setting.ours(32, plans["ours"]),
    }


def against_peers(rates: dict[str, list[float]]) -> Iterator[Claim]:
    """Ratios of the same round, of which the median counts."""
    for name, ours, peer in (
        ("native_1x4_vs_original", "native_1x4", "original"),
        ("native_4x4_vs_original", "native_4x4", "original"),
        ("native_8x4_vs_original", "native_8x4", "original"),
        ("native_varied_vs_original", "native_varied", "original"),
        ("native_varied_vs_original_varied", "native_varied", "original_varied"),
        ("native_8x4_vs_hf_batched", "native_8x4", "hf_8x4"),
        ("native_varied_vs_hf_batched_varied", "native_varied", "hf_varied"),
    ):
        yield compared(name, rates[ours], rates[peer], "tokens/s")


def against_bounds(setting: Setting, rounds: int) -> Iterator[Claim]:
    """Short rounds of decode steps against what the machine's memory and multipliers allow just
    before and after; and how the steps divide into products of matrices, attention and the rest."""
    size = setting.num_parameters * setting.dtype.itemsize  # tied: the head is the embedding
    read = reader(size, setting.device)
    per_token = 2 * setting.num_parameters  # operations
    for name, num_prompts, bound in (
        ("bandwidth_share", 1, lambda: SIBLINGS * read() / size),
        ("flop_share", 8, lambda: flops(setting.dtype, setting.device) / per_token),
    ):
        rows = num_prompts * SIBLINGS
        steps, by_torch, bounds = list[Step](), list[Step](), list[float]()
        for _ in range(rounds):
            step, allowed = beside(bound, functools.partial(setting.step, num_prompts))
            steps.append(step)
            bounds.append(allowed)
            if setting.device == CPU:
                by_torch.append(setting.step_by_torch(num_prompts))
            progress(f"{name}: {rows / step.whole:.4g} of {allowed:.4g} tokens/s")
        rates = [rows / each.whole for each in steps]
        yield bounded(f"{name}_{rows}_rows", rates, bounds, "tokens/s")
        if setting.device != CPU:
            continue
        products = [rows / each.products for each in steps]
        yield bounded(f"products_alone_{rows}_rows", products, bounds, "tokens/s")
        yield from divided(f"step_{rows}_rows", steps)
        before = [rows / each.whole for each in by_torch]
        yield compared(f"compiled_vs_torch_{rows}_rows", rates, before, "tokens/s")


def beside(bound: Callable[[], float], work: Callable[[], Step]) -> tuple[Step, float]:
    """What `work` returns, and the mean of the bound just before it and just after: what others
    leave of a shared machine's memory changes within minutes."""
    before, done = bound(), work()
    return done, (before + bound()) / 2


def divided(name: str, steps: Sequence[Step]) -> Iterator[Claim]:
    """The seconds of each part; their share is that of the step."""
    for part in ("products", "attention", "rest"):
        taken = [float(getattr(each, part)) for each in steps]
        shares = [each / step.whole for each, step in zip(taken, steps, strict=True)]
        yield Claim(
            f"{name}_{part}", statistics.median(taken), "s", share=statistics.median(shares),
            n=len(taken), spread=spread(taken),
        )  # fmt: skip


def against_onednn(setting: Setting, rounds: int) -> Iterator[Claim]:
    """All weights multiplied in the order that is taken here, by turns with oneDNN's."""
    if setting.device != CPU or not gemm.can_pack(setting.dtype):
        return
    linear = [each for each in setting.hf.modules() if isinstance(each, torch.nn.Linear)]
    with torch.inference_mode():
        packed = [gemm.pack(each.weight) for each in linear]
        ordered = [gemm.OnednnWeight(each.weight) for each in linear]

    @torch.inference_mode()
    def rate(weights: Sequence[gemm.PackedWeight], rows: int) -> float:
        taken = [torch.ones(rows, each.in_features, dtype=setting.dtype) for each in linear]
        pairs = list(zip(weights, taken, strict=True))
        return rows / seconds(lambda: [each.multiply(own, None) for each, own in pairs])

    for rows in (SIBLINGS, 8 * SIBLINGS):
        ways = {"ours": packed, "oneDNN": ordered}
        measures = {way: functools.partial(rate, own, rows) for way, own in ways.items()}
        for warm_up in measures.values():
            warm_up()
        rates = interleaved(measures, repeats=rounds)
        name = f"products_vs_onednn_{rows}_rows"
        yield compared(name, rates["ours"], rates["oneDNN"], "tokens/s")


def against_copy(setting: Setting, rounds: int) -> Iterator[Claim]:
    """Newer weights between two decode steps, by turns with the copy alone and with the look at
    every number that was once taken there."""
    with TemporaryDirectory(prefix="bench-generation-") as folder:
        save_file(models.weights_of(setting.hf), file := Path(folder) / "model.safetensors")
        staged = MappedTensors(file)
        check_finite(staged)  # as is done beside the sampling, which brings the pages here
        taken = interleaved(
            {
                "copy": lambda: setting.copy(staged),
                "stall": lambda: setting.stall(staged),
                "stall with looks": lambda: setting.stall(staged, looks=True),
            },
            repeats=rounds,
        )
    stalls, copies, looks = taken["stall"], taken["copy"], taken["stall with looks"]
    yield replace(
        compared("apply_stall", stalls, looks, "s", less_is_better=True),
        bound=statistics.median(copies),
        share=statistics.median(b / a for a, b in zip(stalls, copies, strict=True)),
    )
    beyond = statistics.median(a - b for a, b in zip(stalls, copies, strict=True))
    yield Claim(
        "apply_stall_beyond_copy", beyond, "s", bound=MAX_STALL, share=beyond / MAX_STALL, n=rounds
    )


def tiny(*, repeats: int, device: torch.device) -> Claim:
    """The embedded model on its own task, 24 groups of 8 through 32 slots."""
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    dtype, _ = models.choose_dtype(device)
    asked = [
        Request(index, np.array(models.chat_prompt(tokenizer, problem.messages), np.int32))
        for index, problem in enumerate(
            problem
            for problem in islice(calculator.problems("train", 0), TINY_GROUPS)
            for _ in range(TINY_SIBLINGS)
        )
    ]
    rates: dict[str, Callable[[], float]] = {}
    for kind in (NativeEngine, HfEngine):
        model = models.load_model(models.EMBEDDED, device=device, dtype=dtype)
        rates[kind.__name__] = functools.partial(rate, kind(model, tokenizer), asked)
        rates[kind.__name__]()
    taken = interleaved(rates, repeats=repeats)
    ours, peer = taken["NativeEngine"], taken["HfEngine"]
    return compared("native_tiny_vs_hf_batched", ours, peer, "rollouts/s")


def rate(engine: NativeEngine | HfEngine, asked: Sequence[Request]) -> float:
    """Completions per second."""
    return len(asked) / seconds(lambda: list(engine.generate(asked, Sampling())))
