"""Which engine runs, and why."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch

from peralta_zmq import registry
from peralta_zmq.engines.engine_models import read_config
from peralta_zmq.engines.vllm import refusals
from peralta_zmq.errors import ConfigError, import_extra
from peralta_zmq.registry import EngineSettings, LiveEngineFactory
from peralta_zmq.rollout import Sampling

AUTO = "auto"
# Settings of [engine] that not every shipped engine has -> the engines that have them.
ENGINES_WITH = {
    "quantize": ("mlx",),
    "tensor_parallel_size": ("vllm",),
    "vllm_args": ("vllm",),
}


class Machine(NamedTuple):
    """What the automatic choice depends on."""

    is_apple: bool  # Apple silicon
    has_mlx: bool  # mlx-lm is installed
    has_cuda: bool = False  # torch can use a CUDA device
    vllm: str | None = None  # version of vLLM; None = not installed


def this_machine() -> Machine:
    is_apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    return Machine(
        is_apple,
        has_mlx=importlib.util.find_spec("mlx_lm") is not None,
        has_cuda=torch.cuda.is_available(),
        vllm=refusals.installed_version(),
    )


def choose_engine(
    name: str,
    settings: EngineSettings,
    *,
    samplings: Sequence[Sampling] = (),
    folder: Path | None = None,
    merges_adapters: bool = False,
    machine: Machine | None = None,  # None = this machine
) -> tuple[str, str]:
    """The engine for `engine.name`, and the reason.

    `auto` takes the native engine where vLLM or mlx-lm lack a sampling option or the model in
    `folder`. Raises ConfigError if the engine lacks a setting, a sampling option, its library or,
    engine mlx, the model, and StoreError for a folder without a readable config.json. Engine vllm
    may run models that vLLM lacks with transformers' code; its start shows whether it can.
    """
    machine = machine or this_machine()
    chosen = name
    reason = "set by engine.name"

    merges = folder if merges_adapters else None
    check_vllm = partial(_check_vllm, settings, samplings, machine, merges)
    check_mlx = partial(_check_mlx, settings, folder, merges)
    if name == AUTO:
        chosen, reason = _automatic(machine, folder, settings, check_vllm, check_mlx)
    elif name == "vllm":
        check_vllm()
    _check(chosen, settings, f" ({reason})" if name == AUTO else "")
    if name == "mlx":
        check_mlx()
    if chosen == "native" and folder is not None:
        reason += _fallback(folder)
    return chosen, reason


def _fallback(folder: Path) -> str:
    """The model in `folder` as part of a reason, if the native engine lacks it."""
    from peralta_zmq.engines.native.decoder import FAMILIES

    family = read_config(folder).get("model_type")
    return "" if family in FAMILIES else f"; it samples {family} with transformers' code"


def _automatic(
    machine: Machine,
    folder: Path | None,
    settings: EngineSettings,
    check_vllm: Callable[[], None],
    check_mlx: Callable[[], None],
) -> tuple[str, str]:
    if machine.is_apple:
        if not machine.has_mlx:
            return "native", "auto: mlx-lm is not installed; pip install 'peralta_zmq[mlx]'"
        try:
            check_mlx()
        except ConfigError as error:
            return "native", f"auto: {error}"
        return "mlx", "auto: Apple silicon with mlx-lm"
    if machine.has_cuda and settings.device.startswith(("auto", "cuda")):
        try:
            check_vllm()
            if folder is not None:
                refusals.check_model(read_config(folder))
        except ConfigError as error:
            return "native", f"auto: {error}"
        return "vllm", f"auto: CUDA with vLLM {machine.vllm}"
    return "native", "auto: neither Apple silicon nor CUDA"


def _check_vllm(
    settings: EngineSettings, samplings: Sequence[Sampling], machine: Machine, merges: Path | None
) -> None:
    """Raise ConfigError if engine vllm cannot run with these settings, or merge adapters."""
    refusals.check_version(machine.vllm, has_cuda=machine.has_cuda)
    refusals.check_arguments(settings.vllm_args)
    for sampling in samplings:
        refusals.check_sampling(sampling)
    if merges is not None:
        _check_merge("vllm", merges)


def _check_mlx(settings: EngineSettings, folder: Path | None, merges: Path | None) -> None:
    """Raise ConfigError if engine mlx cannot serve the model in `folder`, or merge adapters."""
    from peralta_zmq.engines.mlx.mlx_model import check_config

    if folder is not None:
        check_config(read_config(folder), max_model_len=settings.max_model_len)
    if merges is not None:
        _check_merge("mlx", merges)


def _check_merge(name: str, folder: Path) -> None:
    """Raise ConfigError if engine vllm or mlx cannot merge adapters into the weight files."""
    config = read_config(folder)
    kind = "quantized" if "quantization_config" in config else ""
    if name == "vllm" and "text_config" in config:
        kind = "multimodal"
    if kind:
        raise ConfigError(
            f"engine '{name}' cannot merge adapters into the {kind} model in {folder}; "
            "set engine.name to native"
        )


def _check(name: str, settings: EngineSettings, why: str) -> None:
    """Raise ConfigError if an engine, chosen because of `why`, lacks a setting or its library."""
    for option, engines in ENGINES_WITH.items():
        value = getattr(settings, option)
        if value and registry.is_shipped("engine", name) and name not in engines:
            raise ConfigError(
                f"engine.{option} {value} is not an option of engine '{name}'{why}; "
                f"remove it or set engine.name to {' or '.join(engines)}"
            )
    if name == "mlx":
        import_extra("mlx_lm", extra="mlx", needed_by="engine.name 'mlx'")


def live_engine(name: str) -> LiveEngineFactory:
    """The class with which a trainer with `engine.name` `name` evaluates its model.

    The native engine where the named one cannot open a torch model in memory.
    """
    factory = registry.resolve("engine", "native" if name == AUTO else name)
    if not hasattr(factory, "open_live"):
        factory = registry.resolve("engine", "native")
    return cast(LiveEngineFactory, factory)
