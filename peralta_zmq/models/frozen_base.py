"""Frozen models, stored in a format of base_formats.py: bases of LoRA adapters, teachers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from peralta_zmq.errors import ConfigError
from peralta_zmq.models.base_formats import (
    BYTES_PER_WEIGHT,
    PACKED_FORMATS,
    PackedTensor,
    digest_of,
    pack,
)
from peralta_zmq.models.frozen_layers import freeze
from peralta_zmq.models.model_folders import (
    COMPUTED,
    WEIGHT_FILES,
    Model,
    check_tensors,
    load_model,
    load_tokenizer,
    model_folder,
    model_loading_errors,
    model_without_memory,
    tensor_locations,
)
from peralta_zmq.models.published_names import weights_of


def load_frozen_base(
    folder: Path, base_dtype: str, *, device: torch.device, trust_remote_code: bool = False
) -> Model:
    """Load the model in `folder` for adapters, with its weights in the format `base_dtype`.

    Raises ConfigError as `load_model`, and for a model whose weights cannot be packed.
    """
    if base_dtype in PACKED_FORMATS:
        model, packed = _load_packed(folder, base_dtype, trust_remote_code)
    else:
        model = _load_bfloat16(folder, torch.device("cpu"), trust_remote_code)
        packed = dict[str, PackedTensor]()
    freeze(model, packed, device)
    return cast(Any, model).to(device)


def load_teacher(
    name: str, *, policy: Model, policy_name: str, trust_remote_code: bool = False
) -> Model:
    """Load the model `name`, frozen, as a teacher of `policy`, the model `policy_name`.

    In bfloat16 if all its files are, else in float32. Raises ConfigError if it has another
    vocabulary, or fewer logits than the policy.
    """
    folder = model_folder(name)
    teacher_ids, policy_ids = (
        load_tokenizer(each, trust_remote_code=trust_remote_code, needs_template=False).get_vocab()
        for each in (folder, model_folder(policy_name))
    )
    if differing := sorted(policy_ids.items() ^ teacher_ids.items()):
        token = differing[0][0]
        raise ConfigError(
            f"model.teacher {name} has another vocabulary: {token!r} is token "
            f"{teacher_ids.get(token)} there and {policy_ids.get(token)} in model.name "
            f"{policy_name}; choose a teacher with the same tokenizer"
        )
    options: dict[str, Any] = {"device": policy.device, "trust_remote_code": trust_remote_code}
    if has_only_bfloat16(folder):
        teacher = load_frozen_base(folder, "bfloat16", **options)
    else:
        teacher = load_model(folder, dtype=torch.float32, **options).requires_grad_(False)
    if teacher.config.vocab_size < policy.config.vocab_size:
        raise ConfigError(
            f"model.teacher {name} has logits for {teacher.config.vocab_size} tokens, but "
            f"model.name {policy_name} for {policy.config.vocab_size}; "
            "choose a teacher with logits for all tokens"
        )
    return teacher


def has_only_bfloat16(folder: Path) -> bool:
    dtypes = set[str]()
    for path in folder.glob(WEIGHT_FILES):
        with safe_open(path, framework="pt") as opened:
            slices = map(cast(Any, opened).get_slice, cast(Any, opened).keys())
            dtypes |= {each.get_dtype() for each in slices}
    return dtypes == {"BF16"}


class BaseWeights(NamedTuple):
    tensors: Mapping[str, Tensor]
    digest: str | None  # digest of the packed weights; None if the format packs none


def load_base_weights(
    folder: Path,
    base_dtype: str,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> BaseWeights:
    """Load the weights that a trainer with lora.base_dtype `base_dtype` computes with.

    float32 ones are loaded in `dtype`; all others have bfloat16 values. Raises ConfigError as
    `load_frozen_base`.
    """
    if base_dtype not in PACKED_FORMATS:
        if base_dtype == "bfloat16":
            model = _load_bfloat16(folder, device, trust_remote_code)
        else:
            trust = {"trust_remote_code": trust_remote_code}
            model = load_model(folder, device=device, dtype=dtype, **trust)
        return BaseWeights(weights_of(model), None)
    _, linears = _architecture(folder, base_dtype, trust_remote_code)
    tensors = dict[str, Tensor]()
    checksums = dict[str, str]()
    for name, tensor in _read_tensors(folder):
        if name in linears:
            packed = pack(tensor, base_dtype)
            tensors[name] = packed.unpack().to(device)
            checksums[name] = packed.checksum()
        else:
            tensors[name] = tensor.to(device, torch.bfloat16, copy=True)
    return BaseWeights(tensors, digest_of(checksums))


def _load_bfloat16(folder: Path, device: torch.device, trust_remote_code: bool) -> Model:
    """Load a model with all parameters in bfloat16: transformers leaves some in float32."""
    trust = {"trust_remote_code": trust_remote_code}
    model = load_model(folder, device=device, dtype=torch.bfloat16, **trust)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def check_base_dtype(base_dtype: str) -> None:
    if base_dtype not in BYTES_PER_WEIGHT:
        raise ConfigError(
            f"the base model is stored as {base_dtype:.80}, but this program has only "
            f"{', '.join(BYTES_PER_WEIGHT)}; install the trainer's version of peralta_zmq"
        )


# Loading of packed weights.


def _architecture(
    folder: Path, base_dtype: str, trust_remote_code: bool
) -> tuple[Model, frozenset[str]]:
    """The model without memory, and the names of the weights of linear layers in its blocks.

    Raises ConfigError if they cannot be packed.
    """
    model = model_without_memory(folder, trust_remote_code=trust_remote_code)
    linears = frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        # A block is a module in a list of modules, whose name has its number.
        if type(module) is nn.Linear and any(part.isdigit() for part in name.split("."))
    )
    names = {name for name in tensor_locations(folder) if not name.endswith(COMPUTED)}
    unknown = sorted((names - model.state_dict().keys()) | (linears - names))
    if unknown or not linears:
        place = "files" if unknown and unknown[0] in names else "model"
        reason = f"{unknown[0]} is only in the {place}" if unknown else "there are none"
        raise ConfigError(
            f"lora.base_dtype {base_dtype} packs the linear layers of the blocks, which must "
            f"have equal names in transformers and in the files of {folder}: {reason}; use "
            "lora.base_dtype bfloat16"
        )
    return model, linears


def _load_packed(
    folder: Path, base_dtype: str, trust_remote_code: bool
) -> tuple[Model, dict[str, PackedTensor]]:
    """Load a model, and pack the weights of its linear layers, which get zeros without memory."""
    empty, linears = _architecture(folder, base_dtype, trust_remote_code)
    packed = dict[str, PackedTensor]()
    state = dict[str, Tensor]()
    for name, tensor in _read_tensors(folder):
        if name in linears:
            packed[name] = pack(tensor, base_dtype)
            state[name] = torch.zeros((), dtype=torch.bfloat16).expand(tensor.shape)
        else:
            state[name] = tensor.to(torch.bfloat16, copy=True)
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        model, report = cast(Any, type(empty)).from_pretrained(
            None,
            config=empty.config,
            state_dict=state,
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
    check_tensors(folder, model, report)
    return model.eval(), packed


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the files in a model folder, as views of mapped files."""
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        for name, (path, name_in_file) in tensor_locations(folder).items():
            if not name.endswith(COMPUTED):
                with safe_open(path, framework="pt") as opened:
                    yield name, cast(Any, opened).get_tensor(name_in_file)
