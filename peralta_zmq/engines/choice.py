"""Which engine runs, and why."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from peralta_zmq import registry
from peralta_zmq.engines.engine_models import read_config
from peralta_zmq.engines.vllm import refusals
from peralta_zmq.errors import ConfigError, import_extra
from peralta_zmq.registry import EngineSettings, LiveEngineFactory
from peralta_zmq.rollout import Sampling

AUTO = "auto"


class Machine(NamedTuple):
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
    `folder`. Raises ConfigError if the engine lacks a setting, a sampling option or its library,
    or if engine mlx lacks the model; StoreError for a folder without a readable config.json. Engine
    vllm may run models that vLLM lacks with transformers' code; its start shows whether it can.
    """
    machine = machine or this_machine()
    config = {} if folder is None else read_config(folder)  # empty: the model is not known
    merged = config if merges_adapters else {}

    def check(engine: str) -> None:
        if engine == "mlx":
            _check_mlx(settings, config, merged)
        elif engine == "vllm":
            _check_vllm(machine, settings, samplings, merged)

    chosen = name
    reason = "set by engine.name"
    if name == AUTO:
        chosen, reason = _preferred(machine, settings)
        try:
            check(chosen)
            if chosen == "vllm" and config:
                refusals.check_model(config)
        except ConfigError as error:
            chosen = "native"
            reason = f"auto: {error}"
    _check_settings(chosen, settings, f" ({reason})" if name == AUTO else "")
    if name == "mlx":
        import_extra("mlx_lm", extra="mlx", needed_by="engine.name 'mlx'")
    check(name)
    if chosen == "native" and config:
        from peralta_zmq.engines.native.decoder import FAMILIES

        if (family := config.get("model_type")) not in FAMILIES:
            reason += f"; it samples {family} with transformers' code"
    return chosen, reason


def _preferred(machine: Machine, settings: EngineSettings) -> tuple[str, str]:
    """The fastest engine of the machine, and the reason."""
    if machine.is_apple and machine.has_mlx:
        return "mlx", "auto: Apple silicon with mlx-lm"
    if machine.is_apple:
        return "native", "auto: mlx-lm is not installed; pip install 'peralta_zmq[mlx]'"
    if machine.has_cuda and settings.device.startswith(("auto", "cuda")):
        return "vllm", f"auto: CUDA with vLLM {machine.vllm}"
    return "native", "auto: neither Apple silicon nor CUDA"


def _check_vllm(
    machine: Machine,
    settings: EngineSettings,
    samplings: Sequence[Sampling],
    merged: Mapping[str, Any],
) -> None:
    refusals.check_version(machine.vllm, has_cuda=machine.has_cuda)
    refusals.check_arguments(settings.vllm_args)
    for sampling in samplings:
        refusals.check_sampling(sampling)
    if merged.keys() & {"text_config", "quantization_config"}:
        raise _unmergeable("vllm", "multimodal" if "text_config" in merged else "quantized")


def _check_mlx(
    settings: EngineSettings, config: Mapping[str, Any], merged: Mapping[str, Any]
) -> None:
    from peralta_zmq.engines.mlx.mlx_engine import check_config

    if config:
        check_config(config, max_model_len=settings.max_model_len)
    if "quantization_config" in merged:
        raise _unmergeable("mlx", "quantized")


def _unmergeable(name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"engine '{name}' cannot merge adapters into the {kind} model; set engine.name to native"
    )


def _check_settings(name: str, settings: EngineSettings, why: str) -> None:
    """Raise ConfigError if an engine, chosen because of `why`, lacks a setting."""
    for option, engine in (("quantize", "mlx"), ("vllm_args", "vllm")):
        value = getattr(settings, option)
        if value and registry.is_shipped("engine", name) and name != engine:
            raise ConfigError(
                f"engine.{option} {value} is not an option of engine '{name}'{why}; "
                f"remove it or set engine.name to {engine}"
            )


def live_engine(name: str) -> LiveEngineFactory:
    """The engine with which a trainer evaluates its model: native where `name` cannot."""
    factory = registry.resolve("engine", "native" if name == AUTO else name)
    if not hasattr(factory, "open_live"):
        factory = registry.resolve("engine", "native")
    return cast(LiveEngineFactory, factory)
