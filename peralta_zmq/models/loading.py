"""Models and tokenizers in Hugging Face folders: loading, weights by name, chat prompts.

The companion files of a model are its config and tokenizer files, which `from_pretrained` needs in
addition to the weights.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from peralta_zmq.atomic_files import PLAIN_NAME
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Message

transformers_logging.disable_progress_bar()

EMBEDDED = Path(__file__).parent / "embedded"
COMPANION_SUFFIXES = (".json", ".txt", ".jinja")


def model_folder(name: str) -> Path:
    """Folder of a model: 'embedded', a path, or a name in the local Hugging Face cache.

    Raises ConfigError if there is no such model; nothing is downloaded.
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
    """Load the causal language model in `folder`, in evaluation mode.

    Raises ConfigError if transformers cannot load it or tensors are missing.
    """
    with _loading_errors(f"model folder {folder} cannot be loaded"):
        model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    # transformers initializes missing tensors at random
    if missing := sorted(cast("set[str]", report["missing_keys"])):
        raise ConfigError(f"model folder {folder} cannot be loaded: tensor {missing[0]} is missing")
    return cast(Model, model.to(device).eval())


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer in `folder`. Raises ConfigError if it has no chat template."""
    with _loading_errors(f"model folder {folder} has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; use a chat model")
    return cast(Tokenizer, tokenizer)


def check_teacher_vocabulary(teacher_name: str, policy_name: str) -> None:
    """Raise ConfigError unless teacher and policy, two model names, have the same token ids."""
    teacher, policy = _vocabulary(teacher_name), _vocabulary(policy_name)
    if differing := sorted(policy.items() ^ teacher.items()):
        token = differing[0][0]
        raise ConfigError(
            f"model.teacher {teacher_name} has another vocabulary: {token!r} is token "
            f"{teacher.get(token)} there and {policy.get(token)} in model.name {policy_name}; "
            "choose a teacher with the same tokenizer"
        )


def _vocabulary(name: str) -> dict[str, int]:
    """Load the token ids of a model's tokenizer, by token."""
    folder = model_folder(name)
    with _loading_errors(f"model folder {folder} has no usable tokenizer"):
        return dict(AutoTokenizer.from_pretrained(folder).get_vocab())


@contextmanager
def _loading_errors(message: str) -> Generator[None]:
    """Raise ConfigError with `message` for the errors that transformers raises on bad files."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{message}: {str(error).splitlines()[0]}") from None


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors, not copies, by their `save_pretrained` names; tied ones once."""
    named: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in addresses:
            addresses.add(tensor.data_ptr())
            named[name] = tensor
    return named


def apply_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into the model. Raises ValueError, with nothing changed, if they do not fit.

    Reads one tensor at a time from `weights`, so a lazy mapping needs no second copy of the model.
    """
    live = weights_of(model)
    check_weights({name: tensor.shape for name, tensor in live.items()}, weights)
    with torch.no_grad():
        for name, target in live.items():
            target.copy_(weights[name])


def check_weights(shapes: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `weights` are floating-point tensors of these names and shapes.

    Finite values are checked when weights are downloaded: here, where a generator has paused
    sampling, the check would take too long.
    """
    if different := sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(f"tensor names differ, first {different[0]}")
    for name, shape in shapes.items():
        tensor = weights[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {list(shape)}")


def companion_files(folder: Path) -> dict[str, bytes]:
    """Config and tokenizer files by name, which `from_pretrained` needs besides the weights."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.suffix in COMPANION_SUFFIXES
        and file.is_file()
        and "index" not in file.name
        and PLAIN_NAME.fullmatch(file.name)
    }


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat up to the start of the assistant's turn, with thinking disabled."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(cast(str, text), add_special_tokens=False)


def text_of(tokenizer: Tokenizer, token_ids: NDArray[np.integer]) -> str:
    """The text of the tokens, with special tokens."""
    return cast(str, tokenizer.decode(token_ids.tolist()))
