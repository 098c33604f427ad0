"""Low-rank adapters (LoRA): into a model, out of it, and merged into the weights of a base.

Knows peft, which only a trainer needs, and the names of tensors; knows nothing of stores or runs.
What leaves a model has the scale alpha / rank in B, so that W = base + B A is all to know of it.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from peralta_zmq.errors import ConfigError
from peralta_zmq.models import Model, weights_of

ALL_LINEAR = "all-linear"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # as peft names them
ADAPTER = "default"  # the name of ours among a model's
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
WEIGHT_FILES = (".safetensors", ".bin")


class DropoutInTraining(nn.Module):
    """Dropout where gradients are computed, and nowhere else: not when a policy is only scored."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to the same."""
        return nn.functional.dropout(rows, self._share, training=torch.is_grad_enabled())


def add_adapters(
    model: Model,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: Sequence[str] = (ALL_LINEAR,),
    seed: int = 0,
) -> None:
    """Put adapters into the linear layers named, in place; nothing else of it is trained then.

    A is random and B is 0, so that it computes what it did. Raises ConfigError without peft, and
    for layers that are not there or not linear.
    """
    peft = _peft()
    chosen = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, bias="none", task_type="CAUSAL_LM",
        target_modules=_targets(model, target_modules),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(chosen, model, adapter_name=ADAPTER)
    if dropout:
        for layer in _layers(model).values():
            layer.lora_dropout[ADAPTER] = DropoutInTraining(dropout)


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` was here."""
    return bool(_layers(model))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What gradients are computed for, by name: the adapters of a model that has some, else all."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def published_weights(model: nn.Module) -> dict[str, Tensor]:
    """What others need to compute what the model does: its adapters if it has some, else all."""
    found: dict[str, Tensor] = {}
    for name, layer in _layers(model).items():
        found[PREFIX + name + A] = layer.lora_A[ADAPTER].weight.detach()
        found[PREFIX + name + B] = layer.lora_B[ADAPTER].weight.detach() * layer.scaling[ADAPTER]
    return found or weights_of(model)


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the base under the adapters, named as without them."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in weights_of(model).items()
        if ".lora_" not in name
    }


def config_file(model: Model, *, base: str) -> bytes:
    """peft's own description of what `published_weights` gives; `base` is where the base lies."""
    chosen = cast(Any, model).peft_config[ADAPTER]
    described = _peft().LoraConfig(
        r=chosen.r, lora_alpha=chosen.r, target_modules=chosen.target_modules, bias="none",
        task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="peralta-") as folder:
        described.save_pretrained(folder)
        return (Path(folder) / CONFIG_FILE).read_bytes()


def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights of `base` with the adapter added; each is computed when it is asked for.

    Raises ValueError when the adapter is of another model.
    """
    return _Merged(base, adapter)


def digest_of(folder: Path) -> str:
    """What tells the weights in a model folder from all others, 16 hexadecimal digits."""
    hashed = hashlib.sha256()
    for file in sorted(each for each in folder.iterdir() if each.suffix in WEIGHT_FILES):
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 22):
                hashed.update(chunk)
    return hashed.hexdigest()[:16]


class _Merged(Mapping[str, Tensor]):
    def __init__(self, base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> None:
        self._base, self._adapter = base, adapter
        for name in adapter:
            target = _target(name)
            stem = PREFIX + target.removesuffix(".weight")
            pair = adapter.get(stem + A), adapter.get(stem + B)
            if target not in base or pair[0] is None or pair[1] is None:
                raise ValueError(f"{name} is no adapter of this model")
            shape = (pair[1].shape[0], pair[0].shape[-1])
            if pair[0].shape[0] != pair[1].shape[-1] or shape != base[target].shape:
                raise ValueError(f"{name} does not fit {target} {list(base[target].shape)}")

    def __getitem__(self, name: str) -> Tensor:
        weight, stem = self._base[name], PREFIX + name.removesuffix(".weight")
        if stem + A not in self._adapter:
            return weight
        low, high = (self._adapter[stem + each].to(weight.device).float() for each in (A, B))
        return torch.addmm(weight.float(), high, low)  # in fp32; who takes it chooses a format

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _targets(model: Model, names: Sequence[str]) -> str | list[str]:
    """The layers as peft wants them told. Raises ConfigError for what cannot have an adapter."""
    if tuple(names) == (ALL_LINEAR,):
        return ALL_LINEAR
    own = weights_of(model)  # a head that is the embedding is no weight of its own
    fit = [name for name, each in model.named_modules()
           if isinstance(each, nn.Linear) and f"{name}.weight" in own]  # fmt: skip
    for target in names:
        named = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not named or not set(named) <= set(fit):
            there = sorted({name.rpartition(".")[2] for name in fit})
            raise ConfigError(
                f"lora.target_modules has '{target}', which is no linear layer of this model; "
                f"choose from {', '.join(there)}, or {ALL_LINEAR}"
            )
    return list(names)


def _target(name: str) -> str:
    """The weight that a tensor of an adapter belongs to."""
    return name.removeprefix(PREFIX).removesuffix(A).removesuffix(B) + ".weight"


def _layers(model: nn.Module) -> dict[str, Any]:
    return {
        name: each for name, each in model.named_modules()
        if hasattr(each, "lora_A") and hasattr(each, "base_layer")
    }  # fmt: skip


def _peft() -> Any:
    try:
        import peft  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"lora.rank needs peft ({error}): pip install 'peralta_zmq[lora]', "
            "or leave it out to train all weights"
        ) from None
    return peft
