"""End tokens and identity of a tokenizer, in which trainer and generators must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from transformers import GenerationConfig

from peralta_zmq.atomic_files import MANIFEST, MAX_COMPANION, MAX_COMPANIONS, PLAIN_PATH
from peralta_zmq.errors import ConfigError
from peralta_zmq.models.chat_templates import end_of_turn
from peralta_zmq.models.model_folders import Tokenizer, published_config, read_config_file

GENERATION_CONFIG = "generation_config.json"
TEMPLATES = "additional_chat_templates/*.jinja"
# Suffixes of config and tokenizer files, and of Python code. A tokenizer class may name others.
COMPANION_SUFFIXES = {".json", ".txt", ".jinja", ".py", ".model", ".tiktoken"}
# Files that a weight version and a generator's copy of it add.
OWN_FILES = {MANIFEST, "replica.json"}
# Letters of several scripts, digits, white space and code.
FIXED_TEXT = "Naïve café: 12345 + 678.9 =\t?\n\n    def f(x):  return x**2  # Привет, 漢字 🙂"


# End tokens.


def end_token_sources(folder: Path, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The end tokens that each source names: files of the model folder, tokenizer, template."""
    config = _read_json(folder / "config.json")
    nested: Any = config.get("text_config")  # a multimodal model has one
    inner = nested.get("eos_token_id") if isinstance(nested, dict) else None
    return {
        "config.json": _token_ids(config.get("eos_token_id")) + _token_ids(inner),
        GENERATION_CONFIG: _token_ids(_read_json(folder / GENERATION_CONFIG).get("eos_token_id")),
        "tokenizer": _token_ids(tokenizer.eos_token_id),
        "chat template": _token_ids(end_of_turn(tokenizer)),
    }


def folder_end_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    return sorted(set().union(*end_token_sources(folder, tokenizer).values()))


def end_token_ids(config: GenerationConfig | None, tokenizer: Tokenizer) -> list[int]:
    configured = _token_ids(getattr(config, "eos_token_id", None))
    others = *_token_ids(tokenizer.eos_token_id), *_token_ids(end_of_turn(tokenizer))
    return list(dict.fromkeys([*configured, *others]))


def end_tokens_text(folder: Path, tokenizer: Tokenizer) -> str:
    """Names the end tokens of each source if the sources differ; empty if they do not."""
    sources = {name: ids for name, ids in end_token_sources(folder, tokenizer).items() if ids}
    if len(set(map(frozenset, sources.values()))) < 2:
        return ""
    texts = [
        f"{name}: " + ", ".join(f"{token} {tokenizer.decode([token])!r}" for token in token_ids)
        for name, token_ids in sources.items()
    ]
    return f"end tokens differ, any of them ends a completion: {'; '.join(texts)}"


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Tokens that structure a text, such as the marks of a turn, and are no text themselves."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, entry in added if entry.special)}


def _token_ids(value: object) -> list[int]:
    values = cast("Sequence[object]", value if isinstance(value, (list, tuple)) else [value])
    return [each for each in values if type(each) is int and each >= 0]


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or damaged, which loading the model reports."""
    with suppress(OSError, ValueError):
        return read_config_file(file)
    return {}


# Identity.


def tokenizer_identity(folder: Path, tokenizer: Tokenizer) -> str:
    """Properties that differ between tokenizers, as text for a manifest."""
    end_ids = ",".join(map(str, folder_end_ids(folder, tokenizer)))
    tokens = tokenizer.encode(FIXED_TEXT, add_special_tokens=False)
    return (
        f"vocab_size={len(tokenizer)} end_tokens={end_ids} "
        f"chat_template={_digest(tokenizer.chat_template)} tokens_of_a_text={_digest(tokens)}"
    )


def tokenizer_changes(before: str | None, now: str | None) -> str:
    """The properties that differ; None (made by an older version) equals any other identity."""
    pairs = zip((before or "").split(), (now or "").split(), strict=False)
    return ", ".join(f"{old} -> {new}" for old, new in pairs if old != new)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# Companion files.


def companion_files(
    folder: Path, tokenizer: Tokenizer, *, dtype: str | None = None
) -> dict[str, bytes]:
    """The config, tokenizer and processor files of models trained from that in `folder`, by name.

    The generation config gets the end tokens of all sources. Leaves out names that receivers
    refuse.
    """
    vocabulary = set(tokenizer.vocab_files_names.values())
    paths = {
        name: path
        for path in sorted((*folder.iterdir(), *folder.glob(TEMPLATES)))
        if (name := path.relative_to(folder).as_posix()) not in OWN_FILES
        and path.is_file()
        and (name in vocabulary or COMPANION_SUFFIXES.intersection(path.suffixes))
        and not name.endswith(".index.json")  # lists of sharded weight files
        and PLAIN_PATH.fullmatch(name)
    }
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(largest, 0) > MAX_COMPANION or sum(sizes.values()) > MAX_COMPANIONS:
        raise ConfigError(
            f"model folder {folder}: {largest} has {sizes[largest] >> 20} MiB, too many to publish "
            f"it with each keyframe (at most {MAX_COMPANION >> 20} MiB); move it away"
        )
    files = {name: path.read_bytes() for name, path in paths.items()}
    config = _read_json(folder / GENERATION_CONFIG)
    end_ids = folder_end_ids(folder, tokenizer)
    if end_ids and set(_token_ids(config.get("eos_token_id"))) != set(end_ids):
        text = json.dumps({**config, "eos_token_id": end_ids}, indent=2) + "\n"
        files[GENERATION_CONFIG] = text.encode()
    published = json.dumps(published_config(folder, dtype=dtype), indent=2)
    return {**files, "config.json": published.encode()}
