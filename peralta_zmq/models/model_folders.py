"""Models and tokenizers of Hugging Face folders: loading, weights."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from peralta_zmq.atomic_files import MANIFEST, parse_object
from peralta_zmq.errors import ConfigError, OutageError, PeraltaError, limit_text
from peralta_zmq.models.device import is_out_of_memory
from peralta_zmq.models.published_names import TEXT_NAMES, LazyWeights, text_names, weights_of

transformers_logging.disable_progress_bar()
# transformers' log handler prints texts of a model folder, such as names of tensors, unescaped. The
# program's handler (config/programs.py) escapes control characters.
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()
# Its table of missing and unexpected tensors; `check_tensors` raises an error instead.
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in record.getMessage()
)

# Small models that are part of this package; the second one was taught turns and tool calls.
EMBEDDED = Path(__file__).parent / "embedded"
EMBEDDED_TURNS = Path(__file__).parent / "embedded_turns"
WEIGHT_FILES = "model*.safetensors"
# Endings of the names of tensors that models compute from their config.
COMPUTED = (
    ".rotary_emb.inv_freq",
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    ".causal_mask",
)
CONVERTED_FORMATS = ("fp8", "mxfp4")  # quantized weights that transformers can convert
MAX_LAYERS = 10_000
CONFIG_FILES = ("config.json", "tokenizer_config.json")  # files that may name custom code


def model_folder(name: str) -> Path:
    """Folder of a shipped model, a path, or a model in the Hugging Face cache.

    Raises ConfigError if there is no such model; nothing is downloaded.
    """
    embedded = {each.name: each for each in (EMBEDDED, EMBEDDED_TURNS)}
    folder = embedded.get(name) or Path(os.path.expanduser(name))
    if not folder.exists():
        folder = _cached_folder(name)
    if folder.suffix == ".gguf" or (_has(folder, "*.gguf") and not _has(folder, WEIGHT_FILES)):
        raise ConfigError(
            f"model '{name}' has quantized GGUF weights, which cannot be trained; give the Hugging "
            "Face folder that they were made from"
        )
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter and (folder.parent / "merged/config.json").is_file():
        folder = folder.parent / "merged"  # the same weights in a run folder
    elif is_adapter or ((folder / MANIFEST).is_file() and not _has(folder, WEIGHT_FILES)):
        kind = "is a LoRA adapter" if is_adapter else "has only the changes of a step"
        raise ConfigError(
            f"model '{name}' {kind}; give a complete model: the folder merged/ of a run with "
            "adapters, or the folder made by bin/replay export RUN STEP FOLDER"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model '{name}' has no config.json; give a Hugging Face model folder (for a gated "
            "model, accept its license on its page before hf download)"
        )
    return folder


def _has(folder: Path, pattern: str) -> bool:
    return any(folder.glob(pattern))


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
    """Load the causal language model in `folder`, or the text part of a multimodal model.

    Raises ConfigError if transformers cannot load it, if its tensors are not those of its config,
    or for custom Python code that is not trusted.
    """
    weight_files(folder)
    config = text_config(folder, trust_remote_code=trust_remote_code)
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder,
            config=config,
            key_mapping=TEXT_NAMES,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by `check_tensors`
            trust_remote_code=trust_remote_code,
        )
        check_tensors(folder, model, report)
    if hasattr(config, "quantization_config"):  # transformers converts the weights to bfloat16
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return cast(Model, model.to(device).eval())


def text_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The config of the model in `folder`, or of the text part of a multimodal model.

    With trusted custom code, that of the whole model. Raises ConfigError for a config that cannot
    be read or trained.
    """
    check_code(folder, trust_remote_code=trust_remote_code)
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        written = read_config_file(folder / "config.json")
        sizes = written.get("text_config") or written
        for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
            # Even without weights, each layer takes memory and time.
            if sizes.get(name) and sizes[name] > MAX_LAYERS:
                raise ValueError(f"config.json has {name} {sizes[name]}, above {MAX_LAYERS}")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        if quantized := written.get("quantization_config"):
            method = quantized.get("quant_method")
            if method not in CONVERTED_FORMATS:
                raise ConfigError(
                    f"model folder {folder} has weights in the quantized format {method}, which "
                    "cannot be trained; choose the model with full weights"
                )
            text.quantization_config = {**quantized, "dequantize": True}
        if trust_remote_code and hasattr(config, "auto_map"):
            return config
        if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_type = getattr(text, "model_type", config.model_type)
            raise ConfigError(
                f"model folder {folder} cannot be loaded: transformers has no causal language "
                f"model for model_type '{model_type}'; choose another model"
            )
        text.architectures = [cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]).__name__]
        for name in ("dtype", "eos_token_id"):
            if (value := getattr(config, name, None)) is not None:
                setattr(text, name, value)
        if "tie_word_embeddings" not in (written.get("text_config") or written):
            text.tie_word_embeddings = written.get("tie_word_embeddings", text.tie_word_embeddings)
        return text


def model_without_memory(folder: Path, *, trust_remote_code: bool = False) -> Model:
    """The model in `folder` on the device meta: its modules, and the shapes of its weights.

    Raises ConfigError, as `text_config`.
    """
    config = text_config(folder, trust_remote_code=trust_remote_code)
    with model_loading_errors(f"model folder {folder} cannot be loaded"), torch.device("meta"):
        return cast(Any, AutoModelForCausalLM).from_config(
            config, trust_remote_code=trust_remote_code
        )


def published_config(folder: Path, *, dtype: str | None = None) -> dict[str, Any]:
    """The config.json of models that are trained from the model in `folder`.

    A multimodal model is published as a text model, and a quantized one with full weights, in
    `dtype`, or that of `folder`. Raises ConfigError, as `text_config`.
    """
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        config: dict[str, Any] = read_config_file(folder / "config.json")
        config.pop("quantization_config", None)
        if config.get("text_config") and "auto_map" not in config:
            text = text_config(folder, trust_remote_code=True)  # which has no code without auto_map
            classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
            whole = CONFIG_MAPPING[config["model_type"]]
            if classes.get(whole, None) is classes[type(text)]:  # Qwen3.5
                config["architectures"] = text.architectures
            else:
                # Not the form of transformers 5 for rotary embeddings, which mlx-lm does not read.
                added = json.loads(text.to_json_string(use_diff=False))
                added.pop("rope_parameters", None)
                end_ids = getattr(text, "eos_token_id", None)
                config = {**added, **config["text_config"], "eos_token_id": end_ids}
        for part in (config, config.get("text_config", {})) if dtype else ():
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
        return config


def check_tensors(folder: Path, model: Model, report: Mapping[str, Any]) -> None:
    """Raise ConfigError if the tensors in `folder` are not those of the model's config.

    transformers initializes missing tensors at random; `report` is its loading info. Tensors of
    other parts, such as an image encoder, are permitted.
    """
    modules = dict(model.named_modules())
    settings = cast(Any, model.config).get_text_config()
    # Layers after the last one, which predict further tokens (DeepSeek-V3, GLM).
    count = getattr(settings, "num_nextn_predict_layers", None) or 0
    extra = {f"layers.{settings.num_hidden_layers + index}." for index in range(count)}
    # The tensors in the model's lists of layers, or directly in one of its modules.
    unexpected = [
        name
        for name in report["unexpected_keys"]
        if re.sub(r"\.\d+\..*|\.[^.]*$", "", name) in modules
        and not name.endswith(COMPUTED)
        and not any(f".{part}" in name for part in extra)
    ]
    if missing := sorted(report["missing_keys"]):
        reason = f"tensor {missing[0]} is missing"
    elif mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        reason = f"tensor {name} has the shape {list(found)}, and its config {list(expected)}"
    elif unexpected:
        reason = f"its config has no tensor {min(unexpected)!r}"
    else:
        return
    raise ConfigError(
        f"model folder {folder} cannot be loaded: {reason}; download weights and config.json again"
    )


def max_positions(model: Model) -> int:
    """Largest number of tokens in a sequence, or sys.maxsize if the model has no limit."""
    config = cast(Any, model.config).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


def forward_options(model: Model) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, needs_template: bool = True
) -> Tokenizer:
    """Load the tokenizer in `folder`; ConfigError as `load_model`, or without a chat template."""
    check_code(folder, trust_remote_code=trust_remote_code)
    # transformers reads this file, too, and would report it as a damaged tokenizer.
    with (
        model_loading_errors(f"model folder {folder} has a damaged config.json"),
        suppress(OSError),
    ):
        read_config_file(folder / "config.json")
    message = f"model folder {folder} has no usable tokenizer"
    if _has(folder, "tokenizer.model") and not _has(folder, "tokenizer.json"):
        message += " (SentencePiece files need the packages sentencepiece and protobuf)"
    with model_loading_errors(message):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if needs_template and not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; use a chat model")
    return tokenizer


def check_code(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise ConfigError if the folder needs custom code that is not trusted.

    transformers prefers a class of its own.
    """
    for file in CONFIG_FILES:
        settings = dict[str, Any]()
        with suppress(OSError, ValueError):  # missing or damaged: loading reports it
            settings = read_config_file(folder / file)
        if "auto_map" not in settings or trust_remote_code:
            continue
        if settings.get("model_type") not in CONFIG_MAPPING:
            raise ConfigError(
                f"model folder {folder} has custom Python code (auto_map in {file}); set "
                "model.trust_remote_code on every machine to run it, or remove auto_map"
            )


def read_config_file(file: Path, *, max_bytes: int = 4 << 20) -> dict[str, Any]:
    """The JSON object in a file; OSError, or ValueError if it is damaged or too large."""
    with file.open("rb") as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{file.name} has more than {max_bytes} bytes")
    return parse_object(content)


@contextmanager
def model_loading_errors(message: str) -> Generator[None]:
    """Turn what libraries raise for bad files into ConfigError with `message`.

    At a limit of threads or open files it is OutageError.
    """
    try:
        yield
    except PeraltaError:
        raise
    except BaseException as error:
        # Foreign files make libraries raise anything; a panic of Rust is no Exception.
        is_theirs = isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
        if not is_theirs or is_out_of_memory(error):
            raise
        if limit := limit_text(error):
            raise OutageError(f"{message} now: {limit}") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        # transformers may list all its models.
        raise ConfigError(f"{message}: {reason:.400}") from None


def weight_files(folder: Path) -> list[Path]:
    if paths := sorted(folder.glob(WEIGHT_FILES)):
        return paths
    remedy = "download the model again"
    if _has(folder, "pytorch_model*.bin"):
        code = "from transformers import AutoModelForCausalLM as M; "
        code += f"M.from_pretrained('{folder}').save_pretrained('{folder}')"
        remedy = f'convert its .bin files: python -c "{code}"'
    raise ConfigError(f"model folder {folder} cannot be loaded: it has no {WEIGHT_FILES}; {remedy}")


def folder_weights(folder: Path) -> LazyWeights:
    """The tensors of a model folder, read when accessed; ConfigError if files are bad.

    Of a multimodal model only the text part, under the names of a text model.
    """
    locations = tensor_locations(folder)
    files = {file for file, _ in locations.values()}
    opened: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in files}

    def read(name: str) -> torch.Tensor:
        file, name_in_file = locations[name]
        return opened[file].get_tensor(name_in_file)

    return LazyWeights(locations, read)


def tensor_locations(folder: Path) -> dict[str, tuple[Path, str]]:
    """The tensors of a model folder: name -> file and name in the file; see `folder_weights`."""
    files = dict[str, Path]()
    with model_loading_errors(f"model folder {folder} cannot be loaded"):
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as opened:
                files |= dict.fromkeys(cast(Any, opened).keys(), path)
    return {name: (files[each], each) for name, each in text_names(files).items()}


def converted_weights(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> LazyWeights:
    return LazyWeights(weights, lambda name: weights[name].detach().to("cpu", dtype).contiguous())


def save_weights(
    weights: Mapping[str, torch.Tensor], folder: Path, *, shard_bytes: int = 1 << 30
) -> None:
    """Write model*.safetensors files of about `shard_bytes`, one at a time. Raises OSError."""
    shard = dict[str, torch.Tensor]()
    num_bytes = 0
    num_shards = 0
    for number, (name, tensor) in enumerate(weights.items(), start=1):
        shard[name] = tensor.detach().contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= shard_bytes or number == len(weights):
            num_shards += 1
            file = folder / f"model-{num_shards:05}.safetensors"
            try:
                save_file(shard, file, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from None
            shard = {}
            num_bytes = 0


def apply_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into the model; ValueError, with nothing changed, if they do not fit."""
    live = weights_of(model)
    check_weights({name: tensor.shape for name, tensor in live.items()}, weights)
    with torch.no_grad():
        for name, target in live.items():
            target.copy_(weights[name])


def check_weights(shapes: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `weights` are floats of these names and shapes."""
    if different := sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(f"tensor names differ, first {different[0]}")
    for name, shape in shapes.items():
        tensor = weights[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not a float tensor {list(shape)}"
            )


def text_of(
    tokenizer: Tokenizer, token_ids: Iterable[int], *, skip_special_tokens: bool = False
) -> str:
    """The exact text of the tokens, or without special tokens."""
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return cast(str, tokenizer.decode([*map(int, token_ids)], **options))
