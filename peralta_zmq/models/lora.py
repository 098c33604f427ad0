"""Low-rank adapters (LoRA): adding, publishing, merging into the base model.

An adapter of a linear layer has two matrices, A [rank, in] and B [out, rank]. The trainer publishes
B multiplied by the scale alpha / rank, so generators merge W = base + B A. Only a trainer needs the
package peft.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from peralta_zmq.atomic_files import read_chunks
from peralta_zmq.errors import ConfigError, import_extra
from peralta_zmq.models.model_folders import Model, check_weights
from peralta_zmq.models.published_names import LazyWeights, linear_layers, weights_of

ALL_LINEAR = "all-linear"
# Names of tensors in peft's files.
PREFIX = "base_model.model."
A = ".lora_A.weight"
B = ".lora_B.weight"
ADAPTER = "default"  # peft can hold several adapters by name; this one is used
PEFT_OPTIONS = {"bias": "none", "task_type": "CAUSAL_LM"}
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Types of models with Mamba layers, to whose out_proj peft adds no adapters.
MAMBA_TYPES = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
logger = logging.getLogger(__name__)


def add_adapters(
    model: Model,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str] = (ALL_LINEAR,),
    seed: int = 0,
) -> None:
    """Add adapters, which change no output yet, in place; freeze all other parameters.

    Raises ConfigError without peft, and for `target_modules` that are missing or not linear.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_targets(model, target_modules),
        **PEFT_OPTIONS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:  # peft refuses some layers of Mamba models
            raise ConfigError(f"set other lora.target_modules: {error}") from None
    if unknown := sorted(_layers(model).keys() - linear_layers(model).keys()):
        raise ConfigError(
            f"lora.target_modules makes peft add an adapter to {unknown[0]}, which generators "
            "cannot merge; set it to layers of the attention, such as q_proj and v_proj"
        )
    for layer in _layers(model).values():
        layer.lora_A.float()  # peft gives adapters the dtype of the base layer
        layer.lora_B.float()


def has_adapters(model: nn.Module) -> bool:
    return bool(_layers(model))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with gradients by name: the adapters if the model has any, else all."""
    parameters = model.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def published_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights to publish: the scaled adapters if the model has any, else all."""
    if not (layers := _layers(model)):
        return weights_of(model)
    adapters: dict[str, Tensor] = {}
    names = linear_layers(model)
    for layer_name, layer in layers.items():
        name = names[layer_name]
        scale = layer.scaling[ADAPTER]
        adapters[PREFIX + name + A] = layer.lora_A[ADAPTER].weight.detach()
        adapters[PREFIX + name + B] = layer.lora_B[ADAPTER].weight.detach() * scale
    return adapters


def apply_published(model: nn.Module, adapters: Mapping[str, Tensor]) -> None:
    """Set the adapters to what `published_weights` returned; ValueError if they do not fit."""
    shapes = {name: tensor.shape for name, tensor in published_weights(model).items()}
    check_weights(shapes, adapters)
    names = linear_layers(model)
    with torch.no_grad():
        for layer_name, layer in _layers(model).items():
            name = PREFIX + names[layer_name]
            scale = layer.scaling[ADAPTER]
            layer.lora_A[ADAPTER].weight.copy_(adapters[name + A])
            layer.lora_B[ADAPTER].weight.copy_(adapters[name + B].float() / scale)


def config_file(model: Model, *, base: str) -> bytes:
    """Content of peft's adapter_config.json for `published_weights`.

    `base` is the path or name of the base model. lora_alpha equals r, so that peft scales by 1.
    """
    trained = cast(Any, model).peft_config[ADAPTER]
    config = _peft().LoraConfig(
        r=trained.r,
        lora_alpha=trained.r,
        target_modules=trained.target_modules,
        base_model_name_or_path=base,
        inference_mode=True,
        **PEFT_OPTIONS,
    )
    with tempfile.TemporaryDirectory(prefix="peralta-") as folder:
        config.save_pretrained(folder)
        return (Path(folder) / CONFIG_FILE).read_bytes()


def weights_digest(folder: Path) -> str:
    """First 16 hexadecimal digits of the sha256 of the weight files in a model folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        for chunk in read_chunks(path):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def merged_weights(
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    *,
    base_in_fp32: Callable[[str, Tensor], Tensor] = lambda _, weight: weight.float(),
) -> LazyWeights:
    """Weights of `base` with the adapter added, in fp32 where it is; each is computed when read.

    `base_in_fp32(name, weight)` converts a weight. Raises ValueError if the adapter does not fit.
    """
    for name in adapter:
        layer = name.removeprefix(PREFIX).removesuffix(A).removesuffix(B)
        target = f"{layer}.weight"
        a = adapter.get(PREFIX + layer + A)
        b = adapter.get(PREFIX + layer + B)
        if target not in base or a is None or b is None:
            raise ValueError(f"{name} does not belong to an adapter of this model")
        shape = (b.shape[0], a.shape[-1])
        if a.shape[0] != b.shape[-1] or shape != base[target].shape:
            raise ValueError(f"{name} does not fit {target} {list(base[target].shape)}")

    def read(name: str) -> Tensor:
        weight = base[name]
        stem = PREFIX + name.removesuffix(".weight")
        if stem + A not in adapter:
            return weight
        a, b = (adapter[stem + suffix].to(weight.device).float() for suffix in (A, B))
        return torch.addmm(base_in_fp32(name, weight), b, a)

    return LazyWeights(base, read)


def _targets(model: Model, names: Sequence[str]) -> list[str]:
    """Names of the layers that get adapters: linear, with a weight that is published by itself.

    Raises ConfigError for other layers.
    """
    linear = linear_layers(model)
    if tuple(names) == (ALL_LINEAR,):
        head = model.get_output_embeddings()
        found = [name for name in linear if model.get_submodule(name) is not head]
        if getattr(model.config, "model_type", None) in MAMBA_TYPES:
            found = [name for name in found if not name.endswith(".out_proj")]
        if not found:
            raise ConfigError(
                f"lora.rank is set, but {type(model).__name__} has no linear layer to which an "
                "adapter can be added (it has Conv1D or fused layers); remove lora.rank"
            )
        if any(name.endswith(".experts") for name, _ in model.named_modules()):
            logger.warning("lora.target_modules all-linear adds no adapters to experts")
            # By these names peft finds fused experts, too.
            ends = ("gate_proj", "up_proj", "down_proj")
            found = [name for name in found if not name.endswith(ends)]
        return found
    modules = dict(model.named_modules())
    for target in names:
        matches = {name for name in modules if f".{name}".endswith(f".{target}")}
        if not matches or not matches <= linear.keys():
            choices = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"lora.target_modules has '{target}', which is no linear layer of this model; "
                f"choose from {', '.join(choices)}, or {ALL_LINEAR}"
            )
    return list(names)


def _layers(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def _peft() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it; no kernel is used
    return import_extra("peft", extra="lora", needed_by="lora.rank")
