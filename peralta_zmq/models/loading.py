"""Models and tokenizers of Hugging Face folders: loading, weights.

The companion files of a model are its config and tokenizer files, which `from_pretrained` needs in
addition to the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from peralta_zmq.atomic_files import MALFORMED, PLAIN_NAME
from peralta_zmq.errors import ConfigError
from peralta_zmq.models.device import is_out_of_memory

transformers_logging.disable_progress_bar()
# transformers' log handler prints texts of a model folder, such as names of tensors, unescaped. The
# program's handler (config/programs.py) escapes control characters.
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()

# Small models that are part of this package; the second one was taught turns and tool calls.
EMBEDDED = Path(__file__).parent / "embedded"
EMBEDDED_TURNS = Path(__file__).parent / "embedded_turns"
COMPANION_SUFFIXES = (".json", ".txt", ".jinja", ".py")
WEIGHT_FILES = "model*.safetensors"
SHARD_BYTES = 1 << 30
CONFIG_FILES = ("config.json", "tokenizer_config.json")  # files that may name custom code


def model_folder(name: str) -> Path:
    """Folder of a model.

    `name` is 'embedded', 'embedded_turns', a path, or a name in the local Hugging Face cache.
    Raises ConfigError if there is no such model; nothing is downloaded.
    """
    embedded = {each.name: each for each in (EMBEDDED, EMBEDDED_TURNS)}
    folder = embedded.get(name) or Path(name).expanduser()
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


def load_model(
    folder: Path, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> Model:
    """Load the causal language model in `folder`, in evaluation mode.

    Raises ConfigError if transformers cannot load the model, if tensors are missing, or if the
    folder has custom Python code and `trust_remote_code` is False.
    """
    check_code(folder, trust_remote_code=trust_remote_code)
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    # transformers initializes missing tensors at random
    if missing := sorted(cast("set[str]", report["missing_keys"])):
        raise ConfigError(f"model folder {folder} cannot be loaded: tensor {missing[0]} is missing")
    return cast(Model, model.to(device).eval())


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer in `folder`.

    Raises ConfigError if the tokenizer has no chat template, or for custom code as in `load_model`.
    """
    tokenizer = load_any_tokenizer(folder, trust_remote_code)
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; use a chat model")
    return tokenizer


def load_any_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """Load a tokenizer, with or without chat template."""
    check_code(folder, trust_remote_code=trust_remote_code)
    with model_loading_errors(f"model folder {folder} has no usable tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def check_code(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise ConfigError if the folder has custom code that is not trusted.

    Needed because transformers raises no error for custom code if transformers itself has a class
    for the model: it uses that class instead.
    """
    for file in CONFIG_FILES:
        settings: object = None
        with suppress(OSError, *MALFORMED):  # missing or damaged: loading reports it
            settings = json.loads((folder / file).read_bytes())
        if isinstance(settings, dict) and "auto_map" in settings and not trust_remote_code:
            raise ConfigError(
                f"model folder {folder} has custom Python code (auto_map in {file}); set "
                "model.trust_remote_code on every machine to run it, or remove auto_map"
            )


@contextmanager
def model_loading_errors(message: str) -> Generator[None]:
    """Turn errors of transformers about bad files into ConfigError with `message`."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{message}: {str(error).splitlines()[0]}") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises ConfigError if there is none."""
    if paths := sorted(folder.glob(WEIGHT_FILES)):
        return paths
    raise ConfigError(f"model folder {folder} cannot be loaded: it has no {WEIGHT_FILES}")


def generation_config(folder: Path) -> GenerationConfig:
    """The generation settings of a model folder, or those in the model's config."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model (not copies) by their `save_pretrained` names.

    Tied tensors are included once.
    """
    named: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in addresses:
            addresses.add(tensor.data_ptr())
            named[name] = tensor
    return named


class FolderWeights(Mapping[str, torch.Tensor]):
    """The tensors in the safetensors files of a model folder, read when accessed.

    Raises ConfigError if there is no file, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}  # tensor name -> its opened file
        with model_loading_errors(f"model folder {folder} cannot be loaded"):
            for path in weight_files(folder):
                opened: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class ConvertedWeights(Mapping[str, torch.Tensor]):
    """Weights in another dtype on the CPU; a tensor is converted when it is read."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].detach().to("cpu", self._dtype).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def save_weights(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write model*.safetensors files in `folder`, each with about SHARD_BYTES of tensors.

    Reads one shard at a time from `weights`, which may be a lazy mapping. Raises OSError.
    """
    shard, num_bytes, num_shards = dict[str, torch.Tensor](), 0, 0
    for number, (name, tensor) in enumerate(weights.items(), start=1):
        shard[name] = tensor.detach().contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= SHARD_BYTES or number == len(weights):
            num_shards += 1
            file = folder / f"model-{num_shards:05}.safetensors"
            try:
                save_file(shard, file, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from None
            shard, num_bytes = {}, 0


def apply_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into the model.

    Raises ValueError, with nothing changed, if they do not fit. Reads one tensor at a time from
    `weights`, so a lazy mapping needs no memory for a second copy of the model.
    """
    live = weights_of(model)
    check_weights({name: tensor.shape for name, tensor in live.items()}, weights)
    with torch.no_grad():
        for name, target in live.items():
            target.copy_(weights[name])


def check_weights(shapes: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `weights` are floats of these names and shapes.

    Does not check whether the values are finite, because that takes longer: a generator checks them
    before it pauses sampling and calls this function.
    """
    if different := sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(f"tensor names differ, first {different[0]}")
    for name, shape in shapes.items():
        tensor = weights[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not a float tensor {list(shape)}"
            )


def companion_files(folder: Path) -> dict[str, bytes]:
    """Contents of the config and tokenizer files of a model folder, by file name."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.suffix in COMPANION_SUFFIXES
        and file.is_file()
        and "index" not in file.name  # the index of sharded weight files
        and PLAIN_NAME.fullmatch(file.name)  # receivers refuse other names
    }


def text_of(tokenizer: Tokenizer, token_ids: NDArray[np.integer]) -> str:
    """The text of the tokens, with special tokens."""
    return cast(str, tokenizer.decode(token_ids.tolist()))
