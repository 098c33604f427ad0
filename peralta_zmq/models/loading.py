"""The model: load it, choose device and dtype, write the chat prompt, score tokens.

Knows transformers and torch; knows nothing of rewards, sockets or files of a run.
Tokens are shifted in `token_logprobs` and in `policy.score`, and nowhere else.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch takes large tensors in huge pages

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from peralta_zmq.atomic_files import PLAIN_NAME
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Message

transformers_logging.disable_progress_bar()

Model: TypeAlias = PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase

EMBEDDED = Path(__file__).parent / "embedded"
COMPANIONS = (".json", ".txt", ".jinja")
LOGITS_AT_ONCE = {"cpu": 1 << 21}  # that are widened, so that no new pages are taken
MAX_FACT = 100  # letters; a hello takes a few more
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's, FEAT_BF16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def facts_of(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What computes here, for the hello of a worker: versions, device, numbers and threads."""
    facts = {
        "package": _package_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
    }
    return {name: fact[:MAX_FACT] for name, fact in facts.items()}


def _package_version() -> str:
    try:
        return importlib.metadata.version("peralta_zmq")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def use_threads(num_workers: int = 1) -> int:
    """Give this process its share of the cores it may use; returns the number of threads.

    Two 2-thread torch processes on 2 cores slow each other tenfold, because every barrier waits
    for a thread that has no core. Call before the first torch operation.
    """
    threads = max(1, available_cores() // max(1, num_workers))
    torch.set_num_threads(threads)
    return threads


def keep_memory() -> None:
    """Let this process keep what a step frees for the next one, where glibc gives memory.

    Otherwise every step takes gigabytes of new pages from the system, which can cost as much
    time as a third of its computation.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


def available_cores() -> int:
    """Cores that affinity and the cgroup quota leave to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.exists():
        quota, period = quota_file.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores or 1, max(1, int(quota) // int(period)))
    return cores or 1


def device_name(device: torch.device) -> str:
    """The device as a person knows it: cuda:0 (NVIDIA H200)."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def choose_device(device: str = "auto") -> torch.device:
    """The accelerator of this machine when there is one, else the CPU.

    Raises ConfigError for a device that torch does not know or cannot reach.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and torch.backends.mps.is_available():
            device = "mps"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{device}' cannot be used here ({reason}); try 'auto'") from None


def model_folder(name: str) -> Path:
    """Where the model lies: 'embedded', a folder, or a name in the local Hugging Face cache.

    Raises ConfigError when there is no such model; nothing is ever downloaded.
    """
    folder = EMBEDDED if name == "embedded" else Path(name).expanduser()
    if not folder.is_dir():
        folder = _cached_folder(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model '{name}' has no config.json; give a Hugging Face model folder")
    return folder


def _cached_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"model '{name}' is neither a folder nor in the Hugging Face cache; "
            f"fetch it once with: hf download {name}"
        ) from None


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Model:
    """The causal language model in `folder`, in evaluation mode.

    Raises ConfigError when the folder is not a model that transformers can read.
    """
    try:
        model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model folder {folder} cannot be loaded: {reason}") from None
    # transformers would make random ones
    if missing := sorted(cast("set[str]", report["missing_keys"])):
        raise ConfigError(f"model folder {folder} cannot be loaded: it lacks {missing[0]}")
    return cast(Model, model.to(device).eval())


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises ConfigError when there is none, or no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model folder {folder} has no usable tokenizer: {reason}") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; use a chat model")
    return cast(Tokenizer, tokenizer)


def vocabulary_of(folder: Path) -> dict[str, int]:
    """Every token of the tokenizer in `folder` with its number. Raises ConfigError."""
    try:
        return dict(AutoTokenizer.from_pretrained(folder).get_vocab())
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model folder {folder} has no usable tokenizer: {reason}") from None


def new_model(settings: Mapping[str, Any], *, seed: int) -> Model:
    """A randomly initialised fp32 model from the settings of a config.json."""
    torch.manual_seed(seed)
    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return cast(Model, AutoModelForCausalLM.from_config(config))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by name, tied ones once, as `save_pretrained` names them."""
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            named[name] = tensor
    return named


def apply_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into the live model: all of them, or none and ValueError says why.

    Tensors are taken from `weights` one at a time, so a lazy mapping needs no second model.
    """
    live = weights_of(model)
    check_weights({name: tensor.shape for name, tensor in live.items()}, weights)
    with torch.no_grad():
        for name, target in live.items():
            target.copy_(weights[name])


def check_weights(shapes: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `weights` have these names and shapes.

    Whether they are finite is asked while they are staged: a look at every number takes too long
    between two tokens.
    """
    if strange := sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(f"tensor names differ, first {strange[0]}")
    for name, shape in shapes.items():
        tensor = weights[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {list(shape)}")


def choose_dtype(device: torch.device, name: str = "auto") -> tuple[torch.dtype, str]:
    """Compute dtype for sampling and the reason for it: `auto` takes the narrowest that the
    hardware multiplies natively."""
    if name != "auto":
        return DTYPES[name], "as model.dtype says"
    return native_dtype(device.type, has_bf16=_has_bf16(device))


def native_dtype(kind: str, *, has_bf16: bool) -> tuple[torch.dtype, str]:
    """The narrowest dtype that a device of this kind multiplies natively, and the reason."""
    if kind == "mps":
        return torch.float16, "auto: half the memory of float32 on mps"
    name = "GPU" if kind == "cuda" else "CPU"
    if has_bf16:
        return torch.bfloat16, f"auto: this {name} multiplies it"
    if kind == "cuda":
        return torch.float16, "auto: this GPU has no bfloat16"
    return torch.float32, "auto: this CPU tells of no bfloat16"


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    described = Path("/proc/cpuinfo")
    return described.exists() and multiplies_bf16(described.read_text("ascii", errors="replace"))


def multiplies_bf16(cpuinfo: str) -> bool:
    """Whether Linux names an instruction for it among the flags (x86) or features (ARM)."""
    return not BF16_FLAGS.isdisjoint(cpuinfo.split())


def companion_files(folder: Path) -> dict[str, bytes]:
    """Config, generation config and tokenizer: what `from_pretrained` needs beside the weights."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.suffix in COMPANIONS
        and file.is_file()
        and "index" not in file.name
        and PLAIN_NAME.fullmatch(file.name)
    }


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of the chat so far with the opening of the assistant's turn; thinking off."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(cast(str, text), add_special_tokens=False)


def text_of(tokenizer: Tokenizer, token_ids: NDArray[np.integer]) -> str:
    """The tokens as text, special tokens included."""
    return cast(str, tokenizer.decode(token_ids.tolist()))


def token_logprobs(
    model: Model,
    token_ids: torch.Tensor,  # [B, T]
    attention_mask: torch.Tensor,  # [B, T]
    *,
    temperature: torch.Tensor | float = 1.0,  # one for all, or that of each token [B, T]
) -> torch.Tensor:
    """Log-probability of token t given the tokens before it, [B, T], 0 for t = 0.

    Over the full vocabulary at `temperature`: the definition on Rollout.logprobs.
    """
    logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[:, 1:]
    logprobs = selected_logprobs(logits[:, :-1], token_ids[:, 1:], temperature=temperature)
    return torch.nn.functional.pad(logprobs, (1, 0))


def selected_logprobs(
    logits: torch.Tensor,  # [..., V]
    token_ids: torch.Tensor,  # [...]
    *,
    temperature: torch.Tensor | float = 1.0,  # one for all, or [...]
) -> torch.Tensor:
    """log softmax(logits / temperature) at `token_ids`, [...]; fp32, float64 from float64."""
    return cast(torch.Tensor, _SelectedLogprobs.apply(logits, token_ids, temperature))


def entropies(
    logits: torch.Tensor,  # [..., V]
    *,
    temperature: torch.Tensor | float = 1.0,  # one for all, or [...]
) -> torch.Tensor:
    """-sum p log p of softmax(logits / temperature), in nats, [...]."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(-1)
    logprobs = (logits.to(_wide(logits)) / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


class _SelectedLogprobs(torch.autograd.Function):
    """A few rows at a time both ways, so that the vocabulary is there in fp32 for those only."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, token_ids: torch.Tensor, temperature: torch.Tensor | float
    ) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        heat = torch.as_tensor(temperature, dtype=_wide(logits), device=logits.device)
        heat = heat.expand(token_ids.shape).reshape(-1, 1)
        ids = token_ids.reshape(-1, 1)
        found = torch.empty_like(heat)
        for part in _parts(rows):
            scaled = rows[part].to(heat.dtype) / heat[part]
            found[part] = scaled.gather(1, ids[part]) - scaled.logsumexp(1, keepdim=True)
        ctx.save_for_backward(rows, ids, heat)
        ctx.shape = logits.shape
        return found.view(token_ids.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, ids, heat = ctx.saved_tensors
        pull = grads[0].reshape(-1, 1) / heat
        found = torch.empty_like(rows)
        for part in _parts(rows):
            softmax = (rows[part].to(heat.dtype) / heat[part]).softmax(1)
            found[part] = softmax.mul_(-pull[part]).scatter_add_(1, ids[part], pull[part])
        return found.view(ctx.shape), None, None


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _parts(rows: torch.Tensor) -> list[slice]:
    """A few megabytes of rows each: what is freed and taken again costs no new pages."""
    size = max(1, LOGITS_AT_ONCE.get(rows.device.type, 1 << 26) // rows.shape[1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]
