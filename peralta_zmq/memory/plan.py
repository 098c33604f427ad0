"""Memory that a trainer and a generator need, computed from the settings and a model's shape.

A plan lists the parts of the memory in the phase in which their sum is largest. Prompts are assumed
to be as long as engine.max_model_len permits, so a run with short prompts needs less. In formulas,
c is bytes of a number in matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from peralta_zmq.config import Config
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS
from peralta_zmq.engines.native.turn_cache import KEPT_FRACTION
from peralta_zmq.learning.optimizer import PART
from peralta_zmq.memory.model_shape import ModelShape
from peralta_zmq.models.base_formats import BYTES_PER_WEIGHT, PACKED_FORMATS
from peralta_zmq.models.head import KEPT_BYTES, MIN_CHUNK
from peralta_zmq.models.logprobs import CHUNK_LOGITS, DEFAULT_CHUNK_LOGITS
from peralta_zmq.models.tree_attention import MATMUL_LENGTHS, attends_by_span

GIB = 1 << 30
# Bytes of a number, or of a parameter with its share of scales.
NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
REMAINDER_BYTES = {"bfloat16": 2.0, "float16": 4.0}  # by weights.dtype
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0 + 8 / 256}
# Bytes per element that is updated at a time, of at most PART: fp32 copies of both moments, and
# what bitsandbytes allocates on a CPU.
OPTIMIZER_WORK = {"adamw": 0.0, "adamw_bf16": 8.0, "adamw_8bit": 20.0}
# Of Python, torch and transformers in RAM: 0.26 GiB after the imports, more in use (measured on
# Linux). On a GPU of the CUDA context.
PROCESS_BYTES = {"cpu": 0.35 * GIB, "cuda": 0.5 * GIB, "mps": 0.35 * GIB}
MAX_SHARE = 0.5  # of the memory, above which the trainer saves memory at the cost of time
VLLM_FRACTION = 0.9  # of the GPU's memory, if engine.gpu_memory_utilization is not set
Role: TypeAlias = Literal["trainer", "generator"]
Parts: TypeAlias = dict[str, float]  # bytes by name


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan depends on, besides settings and model."""

    kind: str  # type of the device: cpu, cuda or mps
    memory: float  # bytes of the device, or of the machine for a CPU
    training_dtype: str = "bfloat16"  # of the trainer's matrix products
    sampling_dtype: str = "bfloat16"  # of generators, with model.dtype auto
    engine: str = "native"
    keeps_turns: bool = False  # the engine keeps keys and values of turns


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory of one process, in bytes; `parts` are those in the phase of the peak."""

    role: Role
    parts: Parts
    phase: str
    limit: float  # bytes that the process may use

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak <= self.limit


class AttentionSize(NamedTuple):
    """What a layer computes for the attention of a prefix tree (a group)."""

    keys: int  # to which a token attends, including masked ones
    copies: float = 1.0  # of a key


class Workload(NamedTuple):
    """Tokens of a training step, with prompts of the largest length."""

    tokens: int  # of a micro-batch
    attention: AttentionSize
    scored: int  # of these tokens
    update: int  # of an update of the parameters
    prompt: int


def gib(num_bytes: float) -> str:
    """A number of bytes in GiB, such as 1.25."""
    return f"{num_bytes / GIB:.2f}"


def workload_of(config: Config, shape: ModelShape, machine: Machine) -> Workload:
    """The tokens of a training step."""
    length = min(config.engine.max_model_len, shape.max_positions)
    num_turns = config.task.max_turns if machine.keeps_turns else 1
    completion = min(num_turns * config.max_completion_length, length - 1)
    num_generations = max(config.group_sizes.values())
    group = length - completion + num_generations * completion
    update = max(1, config.groups_per_step * group // config.train.num_minibatches)
    tokens = min(config.train.max_tokens_per_microbatch, update)
    scored = int(tokens * num_generations * completion / group)
    attention = attention_size(min(group, tokens), completion, length)
    return Workload(tokens, attention, scored, update, length - completion)


def attention_size(tree: int, completion: int, length: int) -> AttentionSize:
    """The attention of a tree of `tree` tokens: one prompt and some completions of this size.

    `length` is that of a prompt and a completion.
    """
    path_tokens = (tree - (length - completion)) / completion * length
    if not attends_by_span(tree, path_tokens):
        return AttentionSize(tree)
    return AttentionSize(min(length, tree), max(1.0, path_tokens / tree))


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
    live = replace(machine, engine="native")  # samples from the policy, in float32
    evaluation = _cache_parts(config, shape, live, number=4.0)
    if config.lora.rank is None:
        largest_update = shape.embedding
    else:
        largest_update = config.lora.rank * max(map(max, shape.linear_layers))
        if config.lora.base_dtype != "float32":  # the engine converts a weight for its product
            evaluation["converted weight"] = 4.0 * max(shape.embedding, shape.largest_linear)
    phases = {
        **_backward_phases(config, shape, machine, gradients),
        "optimizer step": {
            "gradients": gradients,
            "work of the optimizer": OPTIMIZER_WORK[optim] * min(PART, largest_update),
        },
        "copy of the weights to publish": {"gradients": gradients, "copy": snapshot},
    }
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

    It does if weights, gradients, optimizer state and two copies need more than MAX_SHARE of the
    memory; otherwise copies stay in memory, because steps are then shorter. A trainer on a CUDA
    GPU does not: the copies are in the memory of the CPU.
    """
    trained, weights = _parameters(config, shape)
    copies = 2 * NUMBER_BYTES[config.weights.dtype]
    state = 4.0 + OPTIMIZER_BYTES[config.train.optim] + _remainder_bytes(config)
    needed = weights + (state + copies) * trained
    return machine.kind != "cuda" and needed > MAX_SHARE * _trainer_limit(config, machine)


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
    trained = shape.adapter_parameters(rank)
    return trained, frozen_bytes(shape, config.lora.base_dtype) + 4.0 * trained


def frozen_bytes(shape: ModelShape, base_dtype: str) -> float:
    """Bytes of a model that is not trained, in a format of models/base_formats.py."""
    linears = BYTES_PER_WEIGHT[base_dtype] * shape.linear_parameters
    embeddings = shape.num_parameters - shape.linear_parameters - shape.vectors
    return linears + (4.0 if base_dtype == "float32" else 2.0) * embeddings + 4.0 * shape.vectors


def _backward_phases(
    config: Config, shape: ModelShape, machine: Machine, gradients: float
) -> dict[str, Parts]:
    """Parts in phases of the backward pass: head, last layer, first layer, embedding."""
    work = workload_of(config, shape, machine)
    is_full = config.lora.rank is None
    is_cpu = machine.kind == "cpu"
    has_earlier = work.update > work.tokens
    layer = work.tokens * layer_bytes(config, shape, machine, work.attention)
    one_layer = work.tokens * backward_bytes(shape, machine) + _linear_work(config, shape, machine)
    activations = layer * shape.num_layers
    computed_again = 0.0
    gaps = 0.0
    if config.train.gradient_checkpointing:  # keeps the input of each layer
        activations = 4.0 * work.tokens * shape.hidden_size * shape.num_layers
        computed_again = layer
        # The kept input of a layer lies between freed tensors. malloc (CPU) cannot place a larger
        # tensor in such a gap. Planned: as much as the tensors themselves.
        gaps = (activations + computed_again + one_layer) * is_cpu
    head_gradient = 4.0 * shape.embedding * is_full
    # Gradients of earlier micro-batches. On a CPU the process keeps freed memory, and gradients
    # seldom fit into the holes that activations leave, so that it has memory for both.
    kept_gradients = gradients if has_earlier or is_cpu else head_gradient
    # autograd adds it to that of the tied head (on a CPU models/head.py does), or of earlier
    # micro-batches.
    is_added = is_full and (not is_cpu if shape.is_tied else has_earlier)
    keeps_logits = is_full or bool(config.loss.entropy_coef)
    name = f"activations of {work.tokens} tokens"
    return {
        "backward pass of the output head": {
            "gradients": kept_gradients,
            name: activations,
            "output head": head_bytes(shape, machine, work.scored, keeps_logits=keeps_logits),
        },
        "backward pass of the last layer": {
            "gradients": kept_gradients,
            name: activations + computed_again,
            "backward pass of a layer": one_layer,
            "gaps between these tensors": gaps,
        },
        "backward pass of the first layer": {
            "gradients": gradients,
            name: layer,
            "backward pass of a layer": one_layer,
        },
        "backward pass of the embedding": {
            "gradients": gradients,
            "added gradient of the embedding": 4.0 * shape.embedding * is_added,
        },
    }


def layer_bytes(config: Config, shape: ModelShape, machine: Machine, size: AttentionSize) -> float:
    """Bytes per token of the tensors that a layer saves for its backward pass."""
    c = NUMBER_BYTES[machine.training_dtype]
    hidden = shape.hidden_size
    query = shape.query_size
    is_cpu = machine.kind == "cpu"
    # Inputs of both norms, in fp32; transformers' own norms also save the normalized rows.
    norms = 8.0 * hidden * (1 if is_cpu else 2)
    # Inputs of q, k, v, gate and up: under autocast, each has a copy of its own.
    linears = (5 if c < 4 else 2) * c * hidden
    query_norms = (query + shape.key_size) * (c if is_cpu else c + 4) * shape.has_query_norm
    keys_and_values = 2 * size.copies * shape.key_size
    if is_cpu and c < 4 and size.keys in MATMUL_LENGTHS:
        # Probabilities in fp32 and in bf16; queries, keys and values.
        attention = 6.0 * shape.num_heads * size.keys + c * (query + keys_and_values)
    else:  # SDPA, in fp32 on a CPU: queries, keys, values, output, logsumexp, and the mask
        number = 4.0 if is_cpu else c
        attention = number * (2 * query + keys_and_values + size.keys) + 4.0 * shape.num_heads
    output = c * query  # input of o_proj
    # gate, its activation, up, and their product
    mlp = 4 * c * shape.intermediate_size * shape.experts_per_token
    # results of the first matrices
    adapters = c * (config.lora.rank or 0) * len(shape.linear_layers)
    return norms + linears + query_norms + attention + output + mlp + adapters


def backward_bytes(shape: ModelShape, machine: Machine) -> float:
    """Bytes per token of the gradients that exist together in the backward pass of a layer."""
    c = NUMBER_BYTES[machine.training_dtype]
    number = 4.0 if machine.kind == "cpu" else c  # of attention
    attention = number * 2 * (shape.query_size + shape.key_size)
    # Of the MLP's result, and of gate, its activation and up.
    mlp = c * (shape.hidden_size + 3 * shape.intermediate_size * shape.experts_per_token)
    return 4.0 * shape.hidden_size + max(attention, mlp)  # and of the layer's result, in fp32


def _linear_work(config: Config, shape: ModelShape, machine: Machine) -> float:
    """Bytes of the weights and their gradients that the largest linear layer computes."""
    c = NUMBER_BYTES[machine.training_dtype]
    if config.lora.rank is None:  # the gradient in both dtypes
        return shape.largest_linear * (4.0 if c == 4 else c + 4.0)
    is_stored = c == NUMBER_BYTES.get(config.lora.base_dtype)  # in the dtype of the products
    return 0.0 if is_stored else shape.largest_linear * c


def head_bytes(shape: ModelShape, machine: Machine, scored: int, *, keeps_logits: bool) -> float:
    """Bytes of the output head in both passes (models/head.py), without the weight's gradient."""
    c = NUMBER_BYTES[machine.training_dtype]
    hidden = shape.hidden_size
    limit = CHUNK_LOGITS.get(machine.kind, DEFAULT_CHUNK_LOGITS)
    chunk = min(shape.vocab_size, max(MIN_CHUNK, limit // max(1, scored) // MIN_CHUNK * MIN_CHUNK))
    # Logits, and three fp32 arrays of their size; the chunk of the weight and of its gradient.
    work = scored * chunk * (c + 12.0) + chunk * hidden * (c + 4.0)
    kept = min(KEPT_BYTES, c * scored * shape.vocab_size) if keeps_logits else 0.0
    return work + kept + scored * hidden * (4.0 + c + 4.0)  # selected rows, their copy, gradient


# Generator.


def plan_generator(config: Config, shape: ModelShape, machine: Machine) -> Plan:
    """The memory of one generator."""
    c = NUMBER_BYTES[sampling_dtype(config, machine)]
    is_packed = machine.engine == "native" and machine.kind == "cpu"
    weights = c * shape.num_parameters
    if machine.engine == "mlx" and config.engine.quantize:  # codes, and two numbers per 64 weights
        bits = config.engine.quantize + 2 * 8 * c / 64
        weights = c * shape.vectors + bits / 8 * (shape.num_parameters - shape.vectors)
    parts: Parts = {"weights": weights / config.engine.vllm_args.get("tensor_parallel_size", 1)}
    if is_packed and shape.is_tied:
        parts["packed output head"] = c * shape.embedding  # the embedding needs it unpacked
    if config.lora.rank is not None and (base := _base_bytes(config, shape, machine, number=c)):
        parts["base weights, to merge adapters"] = base
    cache = _cache_parts(config, shape, machine, number=c)
    phase = "sampling"
    if is_packed:
        # The engine joins gate and up of a new version, and converts those of another dtype.
        is_converted = sampling_dtype(config, machine) != config.weights.dtype
        joined = 2 * shape.largest_linear * (1 + is_converted)
        loaded = c * max(joined, shape.embedding * is_converted)
        if loaded > cache["logits and prompts"]:  # between two decode steps
            del cache["logits and prompts"]
            cache["temporary weights"] = loaded
            phase = "loading of new weights"
    parts |= cache
    parts["process"] = PROCESS_BYTES[machine.kind]
    limit = generator_fraction(config, machine) * machine.memory
    # The difference is rounded down, so that the sum of all parts is within the limit.
    if reserves_memory(machine) and (rest := int(limit - sum(parts.values()))) > 0:
        parts["more KV cache, reserved by vLLM"] = float(rest)
    return Plan("generator", parts, phase, limit)


def sampling_dtype(config: Config, machine: Machine) -> str:
    """Dtype of a generator's weights and of its KV cache."""
    return machine.sampling_dtype if config.model.dtype == "auto" else config.model.dtype


def reserves_memory(machine: Machine) -> bool:
    """Whether a generator reserves its fraction of the memory at the start."""
    return machine.engine == "vllm" and machine.kind == "cuda"


def generator_fraction(config: Config, machine: Machine) -> float:
    """Fraction of the memory that a generator may use."""
    default = VLLM_FRACTION if reserves_memory(machine) else 1.0
    return config.engine.gpu_memory_utilization or default


def _base_bytes(config: Config, shape: ModelShape, machine: Machine, *, number: float) -> float:
    """Bytes of the base model into which a generator merges adapters, and of its rounding noise.

    See engines/engine_models.py and models/rounding.py.
    """
    base_dtype = config.lora.base_dtype
    noise = 2.0 * shape.linear_parameters * (number < 4.0)
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
    prompts = (
        PROMPT_ROWS * length * (number * 3 * shape.intermediate_size + 8.0 * shape.hidden_size)
    )
    return {
        f"KV cache of {slots} slots": number * rows * length * shape.token_cache,
        "logits and prompts": logits + prompts,
    }
