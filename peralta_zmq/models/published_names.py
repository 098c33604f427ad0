"""Names of tensors in published models: those of the Hugging Face hub.

transformers renames tensors when it loads a model, and fuses the experts of a mixture of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

# Patterns for the names of the text part in a multimodal folder -> names in a text model.
TEXT_NAMES = {
    r"^(?:model\.)?(?:language|text)_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?": "model.",
}
BASE_LAYER = ".base_layer"  # end of the name of a layer in the module that adds an adapter to it


class _View(Tensor):
    """A tensor of which transformers makes views instead of contiguous copies."""

    def contiguous(self, *args: Any, **options: Any) -> Tensor:
        return self


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name, each computed when it is read."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model (not copies) by their `save_pretrained` names, tied ones once.

    Experts are views of a fused tensor. If that is impossible (HRM, Inkling), all tensors have the
    names of the modules.
    """
    names = dict[int, str]()  # by address
    state = model.state_dict()
    for name, tensor in state.items():
        names.setdefault(tensor.data_ptr(), name)
    state = {name: state[name] for name in names.values()}
    if not isinstance(model, PreTrainedModel):
        return state
    # Names must not depend on those in the folder from which the model was loaded.
    vars(model).pop("_weight_conversions", None)
    views: dict[str, Tensor] = {name: each.as_subclass(_View) for name, each in state.items()}
    published = revert_weight_conversion(model, views)
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    if any(each.untyped_storage().data_ptr() not in storages for each in published.values()):
        return state
    return {name: tensor.as_subclass(Tensor) for name, tensor in published.items()}


def linear_layers(model: nn.Module) -> dict[str, str]:
    """Linear layers whose weight is published and not tied: name in the model -> published name.

    A layer with an adapter has its name in the base model.
    """
    names = {each.data_ptr(): _layer(name) for name, each in weights_of(model).items()}
    layers = {
        _layer(f"{name}.weight"): names[module.weight.data_ptr()]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }
    # Not a head that is tied to the embedding.
    return {n: new for n, new in layers.items() if n.rpartition(".")[2] == new.rpartition(".")[2]}


def _layer(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(BASE_LAYER)


def text_names(names: Iterable[str]) -> dict[str, str]:
    """New names of the text part's tensors in a multimodal folder -> their names in `names`."""
    found = {name: name for name in names}
    for pattern, new in TEXT_NAMES.items():
        found = {re.sub(pattern, new, name): old for name, old in found.items()}
    if all(name == old for name, old in found.items()):
        return found
    return {n: old for n, old in found.items() if n != old or n.startswith("lm_head.")}
