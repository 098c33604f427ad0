"""Memory that a trainer and a generator need, computed from the settings and a model's shape.

A plan lists the parts of the memory in the phase in which their sum is largest. It assumes prompts
that fill engine.max_model_len. Weights, gradients, optimizer state and caches are exact;
activations are those of a decoder with attention and a gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from peralta_zmq.config import Config
from peralta_zmq.engines.native.prefix_cache import KEPT_FRACTION, PROMPT_ROWS
from peralta_zmq.memory.model_shape import ModelShape
from peralta_zmq.models.base_formats import BYTES_PER_WEIGHT, PACKED_FORMATS
from peralta_zmq.models.head import KEPT_BYTES
from peralta_zmq.models.logprobs import CHUNK_LOGITS, DEFAULT_CHUNK_LOGITS
from peralta_zmq.models.tree_attention import MATMUL_LENGTHS, attends_by_span

GIB = 1 << 30
# Bytes of a number, or of a parameter with its share of scales.
NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
REMAINDER_BYTES = {"bfloat16": 2.0, "float16": 4.0}  # by weights.dtype
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0 + 8 / 256}
# Python, torch and transformers in RAM (measured on Linux), or the CUDA context on a GPU.
PROCESS_BYTES = {"cpu": 0.35 * GIB, "cuda": 0.5 * GIB, "mps": 0.35 * GIB}
Role: TypeAlias = Literal["trainer", "generator"]
Parts: TypeAlias = dict[str, float]  # bytes by name


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan depends on, besides settings and model."""

    kind: str  # type of the device: cpu, cuda or mps
    memory: float  # bytes of the device, or of the machine for a CPU
    training_dtype: str = "bfloat16"  # dtype of the trainer's matrix products
    sampling_dtype: str = "bfloat16"  # dtype of generators with model.dtype auto
    engine: str = "native"
    keeps_turns: bool = False  # the engine keeps keys and values of turns

    @property
    def reserves_memory(self) -> bool:
        """Whether a generator reserves its fraction of the memory at the start."""
        return self.engine == "vllm" and self.kind == "cuda"


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory of one process, in bytes; `parts` are those in the phase of the peak."""

    role: Role
    parts: Parts
    phase: str
    limit: float  # bytes that the process may use

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


class Workload(NamedTuple):
    """Tokens of a training step, with prompts of the largest length."""

    tokens: int  # tokens of a micro-batch
    scored: int  # generated tokens among them
    update: int  # tokens of an optimizer step
    prompt: int
    keys: int  # to which a token attends, including masked ones


def gib(num_bytes: float) -> str:
    """A number of bytes in GiB, such as 1.25."""
    return f"{num_bytes / GIB:.2f}"


def workload_of(config: Config, shape: ModelShape, machine: Machine) -> Workload:
    length = min(config.engine.max_model_len, shape.max_positions)
    num_turns = config.task.max_turns if machine.keeps_turns else 1
    completion = min(num_turns * config.max_completion_length, length - 1)
    num_generations = max(config.group_sizes.values())
    completions = num_generations * completion
    prompt = length - completion
    group = prompt + completions  # the prompt is computed once
    keys = length if attends_by_span(group, num_generations * length) else group
    update = max(1, config.groups_per_step * group // config.train.num_minibatches)
    tokens = min(config.train.max_tokens_per_microbatch, update)
    return Workload(tokens, tokens * completions // group, update, prompt, keys)


# Trainer.


def plan_trainer(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    *,
    num_references: int = 0,
    teacher_bytes: float = 0.0,
) -> Plan:
    """The memory of the trainer.

    `num_references` is the number of copies of the trained parameters as reference model or
    teacher; `teacher_bytes` are those of model.teacher if the loss uses it.
    """
    optim = config.train.optim
    trained, weights = _parameters(config, shape)
    gradients = 4.0 * trained
    in_memory = machine.kind != "cuda" and not moves_snapshots(config, shape, machine)
    snapshot = NUMBER_BYTES[config.weights.dtype] * trained * in_memory
    always: Parts = {
        "weights": weights,
        f"optimizer state ({optim})": OPTIMIZER_BYTES[optim] * trained,
        "remainders of the master weights": _remainder_bytes(config) * trained,
        "published weights": snapshot,  # the next delta is a difference to them
        "reference model": 4.0 * trained * num_references,
        "teacher": teacher_bytes,
        "process": PROCESS_BYTES[machine.kind],
    }
    phases = {
        "training": {"gradients": gradients, **_activations(config, shape, machine)},
        "backward pass of the embedding": {
            "gradients": gradients,
            "added gradient of the embedding": _added_bytes(config, shape, machine),
        },
        "publishing": {"gradients": gradients, "copy of the weights": snapshot},
    }
    live = replace(machine, engine="native")  # samples from the policy, in float32
    evaluation = _cache_parts(config, shape, live, number=4.0)
    if config.lora.rank is not None and config.lora.base_dtype != "float32":
        evaluation["converted weight"] = 4.0 * shape.embedding  # a copy in fp32
    if machine.kind == "cpu" and in_memory:
        # The process keeps the freed memory of the training. The cache fits into no hole of it, but
        # the tensors of a decode step do.
        del evaluation["logits and prompts"]
        evaluation |= max(phases.values(), key=lambda parts: sum(parts.values()))
    phases["evaluation"] = evaluation
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    parts = {name: size for name, size in {**always, **phases[phase]}.items() if size}
    return Plan("trainer", parts, phase, _trainer_limit(config, machine))


def moves_snapshots(config: Config, shape: ModelShape, machine: Machine) -> bool:
    """Whether the trainer moves copies of its weights to a file while it publishes them.

    It does if weights, gradients, optimizer state and two copies need more than half of the
    memory. Otherwise steps are shorter. Copies of a trainer on a CUDA GPU are in the CPU's memory.
    """
    trained, weights = _parameters(config, shape)
    copies = 2 * NUMBER_BYTES[config.weights.dtype]
    state = 4.0 + OPTIMIZER_BYTES[config.train.optim] + _remainder_bytes(config)
    needed = weights + (state + copies) * trained
    return machine.kind != "cuda" and needed > _trainer_limit(config, machine) / 2


def _trainer_limit(config: Config, machine: Machine) -> float:
    return (config.train.memory_fraction or 1.0) * machine.memory


def _remainder_bytes(config: Config) -> float:
    """Bytes per trained weight of learning/master_weights.py."""
    has_masters = config.lora.rank is None and config.train.master_noise
    return REMAINDER_BYTES.get(config.weights.dtype, 0.0) * has_masters


def _parameters(config: Config, shape: ModelShape) -> tuple[int, float]:
    """Number of trained parameters, and bytes of all weights."""
    rank = config.lora.rank
    if rank is None:
        return shape.num_parameters, 4.0 * shape.num_parameters
    trained = rank * shape.adapted
    return trained, frozen_bytes(shape, config.lora.base_dtype) + 4.0 * trained


def frozen_bytes(shape: ModelShape, base_dtype: str) -> float:
    """Bytes of a model that is not trained, in a format of models/base_formats.py."""
    layers = BYTES_PER_WEIGHT[base_dtype] * shape.layer_parameters
    embeddings = shape.num_parameters - shape.layer_parameters - shape.vectors
    return layers + (4.0 if base_dtype == "float32" else 2.0) * embeddings + 4.0 * shape.vectors


def _activations(config: Config, shape: ModelShape, machine: Machine) -> Parts:
    """The tensors of a micro-batch when the backward pass begins."""
    work = workload_of(config, shape, machine)
    number = NUMBER_BYTES[machine.training_dtype]
    layer = work.tokens * layer_bytes(shape, machine, work.keys)
    activations = layer * shape.num_layers
    if config.train.gradient_checkpointing:  # the input of each layer, and one layer
        activations = 4.0 * work.tokens * shape.hidden_size * shape.num_layers + layer
        if machine.kind == "cpu":
            # Kept inputs lie between freed tensors. malloc cannot place a larger tensor in such a
            # gap. Planned: as much as the tensors themselves.
            activations *= 2
    # Logits of a chunk, and three fp32 arrays of their size; selected rows, their copy, gradient.
    chunk = CHUNK_LOGITS.get(machine.kind, DEFAULT_CHUNK_LOGITS)
    head = (12.0 + number) * chunk + (8.0 + number) * work.scored * shape.hidden_size
    if config.lora.rank is None or config.loss.entropy_coef:
        head += min(KEPT_BYTES, number * work.scored * shape.vocab_size)
    return {f"activations of {work.tokens} tokens": activations, "output head": head}


def _added_bytes(config: Config, shape: ModelShape, machine: Machine) -> float:
    """The gradient of the embedding, while autograd adds it to an earlier one."""
    work = workload_of(config, shape, machine)
    # That of the tied head (models/head.py adds it on a CPU), or of earlier micro-batches.
    is_added = machine.kind != "cpu" if shape.is_tied else work.update > work.tokens
    return 4.0 * shape.embedding * (is_added and config.lora.rank is None)


def layer_bytes(shape: ModelShape, machine: Machine, keys: int) -> float:
    """Bytes per token that a layer saves for its backward pass if a token attends to `keys`.

    In fp32: inputs of both norms. In the dtype of matrix products: inputs of the linear layers,
    four tensors of the MLP, and normalized queries and keys. Attention saves queries, keys, values
    and its output, on a CPU in fp32.
    """
    number = NUMBER_BYTES[machine.training_dtype]
    is_cpu = machine.kind == "cpu"
    norms = 8.0 * shape.hidden_size
    linears = number * (5 * shape.hidden_size + 2 * shape.query_size + shape.key_size)
    mlp = 4 * number * shape.inner_size
    attention = (4.0 if is_cpu else number) * 2 * (shape.query_size + shape.key_size)
    if is_cpu and number < 4 and keys in MATMUL_LENGTHS:
        # Probabilities in both dtypes, instead of the output.
        probabilities = 6.0 * shape.num_heads * keys
        attention = probabilities + number * (shape.query_size + 2 * shape.key_size)
    return norms + linears + mlp + attention


# Generator.


def plan_generator(config: Config, shape: ModelShape, machine: Machine) -> Plan:
    number = NUMBER_BYTES[sampling_dtype(config, machine)]
    weights = number * shape.num_parameters
    if machine.engine == "mlx" and config.engine.quantize:  # codes, and two numbers per 64 weights
        bits = config.engine.quantize + 2 * 8 * number / 64
        weights = number * shape.vectors + bits / 8 * (shape.num_parameters - shape.vectors)
    parts: Parts = {"weights": weights / config.engine.vllm_args.get("tensor_parallel_size", 1)}
    is_packed = machine.engine == "native" and machine.kind == "cpu"
    if is_packed and shape.is_tied:
        parts["packed output head"] = number * shape.embedding  # the embedding needs it unpacked
    if config.lora.rank is not None and (base := _base_bytes(config, shape, machine, number)):
        parts["base weights, to merge adapters"] = base
    parts |= _cache_parts(config, shape, machine, number=number)
    if is_packed and sampling_dtype(config, machine) != config.weights.dtype:
        # Between two decode steps, the engine converts a new version's weights one by one.
        temporary = max(parts["logits and prompts"], number * shape.embedding)
        parts["logits and prompts"] = temporary
    parts["process"] = PROCESS_BYTES[machine.kind]
    limit = generator_fraction(config, machine) * machine.memory
    # The difference is rounded down, so that the sum of all parts is within the limit.
    if machine.reserves_memory and (rest := int(limit - sum(parts.values()))) > 0:
        parts["more KV cache, reserved by vLLM"] = float(rest)
    return Plan("generator", parts, "sampling", limit)


def sampling_dtype(config: Config, machine: Machine) -> str:
    """Dtype of a generator's weights and of its KV cache."""
    return machine.sampling_dtype if config.model.dtype == "auto" else config.model.dtype


def generator_fraction(config: Config, machine: Machine) -> float:
    default = 0.9 if machine.reserves_memory else 1.0  # vLLM's
    return config.engine.gpu_memory_utilization or default


def _base_bytes(config: Config, shape: ModelShape, machine: Machine, number: float) -> float:
    """Bytes of the base model into which a generator merges adapters, and of its rounding noise.

    See engines/engine_models.py and models/rounding.py.
    """
    base_dtype = config.lora.base_dtype
    noise = 2.0 * shape.layer_parameters * (number < 4.0)
    if machine.engine in ("native", "hf"):
        return (number if base_dtype == "float32" else 2.0) * shape.num_parameters + noise
    if machine.kind == "cuda":  # other engines merge in the machine's memory
        return 0.0
    is_unpacked = base_dtype in PACKED_FORMATS  # else they read the files
    return 2.0 * shape.num_parameters * is_unpacked + noise


def _cache_parts(config: Config, shape: ModelShape, machine: Machine, *, number: float) -> Parts:
    """Keys and values of all rows, and the tensors of one decode step with new prompts."""
    slots = config.engine.slots
    length = min(config.engine.max_model_len, shape.max_positions)
    rows = float(slots)
    if machine.engine == "native":
        rows += KEPT_FRACTION * slots * machine.keeps_turns + PROMPT_ROWS
    logits = (slots + PROMPT_ROWS) * shape.vocab_size * (number + 4.0)
    prompts = PROMPT_ROWS * length * (number * 3 * shape.inner_size + 8.0 * shape.hidden_size)
    return {
        f"KV cache of {slots} slots": number * rows * length * shape.token_cache,
        "logits and prompts": logits + prompts,
    }
