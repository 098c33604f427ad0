"""End tokens, identity and companion files of a tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq import atomic_files, models
from peralta_zmq.errors import ConfigError

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
LOOP = "{% for m in messages %}" + TURN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(models.EMBEDDED, tmp_path / "model"))


def change(folder: Path, name: str, **values: Any) -> None:
    content = json.loads((folder / name).read_text("utf-8"))
    (folder / name).write_text(json.dumps({**content, **values}), "utf-8")


def companions_of(folder: Path) -> dict[str, bytes]:
    return models.companion_files(folder, models.load_tokenizer(folder))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (LOOP + "<|im_end|>\n{% endfor %}", 2),
        (LOOP + " <|im_end|>{% endfor %}", 2),  # as Llama 2
        (LOOP + "\n{% endfor %}", None),
        (LOOP + "{% if not loop.last %}<|im_start|>{% else %}<|im_end|>{% endif %}{% endfor %}", 2),
        ("<|im_end|>{{ messages[0].content }}", None),  # renders no completion
        ("{{ raise_exception('no chats') }}", None),
    ],
)
def test_end_of_turn_is_the_special_token_after_a_completion(
    template: str, end: int | None
) -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    tokenizer.chat_template = template
    assert models.end_of_turn(tokenizer) == end


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": [5, 0]}, [0, 2, 5]),
        ({"eos_token_id": None}, {"eos_token_id": None}, [2]),
    ],
)
def test_end_tokens_are_those_of_all_sources_and_are_published(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], ends: list[int]
) -> None:
    change(folder, "config.json", **config)
    change(folder, "generation_config.json", **{"top_k": 3, "eos_token_id": 2, **generation})
    tokenizer = models.load_tokenizer(folder)
    assert models.folder_end_ids(folder, tokenizer) == ends
    published = json.loads(companions_of(folder)["generation_config.json"])
    listed = published["eos_token_id"]
    assert published["top_k"] == 3
    assert (listed if isinstance(listed, list) else [listed]) == ends


def test_end_tokens_of_the_text_part_of_a_multimodal_model_count(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=None, text_config={"eos_token_id": 7})
    assert models.folder_end_ids(folder, models.load_tokenizer(folder)) == [2, 7]


def test_sources_of_end_tokens_are_named_only_if_they_differ(folder: Path) -> None:
    tokenizer = models.load_tokenizer(folder)
    assert models.end_tokens_text(folder, tokenizer) == ""
    change(folder, "generation_config.json", eos_token_id=[2, 0])
    text = models.end_tokens_text(folder, tokenizer)
    assert "generation_config.json: 2 '<|im_end|>', 0 '<|endoftext|>'; tokenizer: 2" in text


@pytest.mark.parametrize("sizes", [[40 << 20], [30 << 20] * 3])
def test_companions_too_large_for_a_reader_are_refused(folder: Path, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        with (folder / f"rows{number}.json").open("wb") as file:
            file.truncate(size)
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    with pytest.raises(ConfigError, match=r"rows0\.json has \d+ MiB, too many .*; move it away"):
        models.companion_files(folder, tokenizer)


def test_companions_are_all_files_that_a_tokenizer_reads(folder: Path) -> None:
    ours = ("manifest.json", "STABLE", "delta.bin", "replica.json")
    weights = ("model.safetensors.index.json", "pytorch_model.bin", "optimizer.pt")
    tokenizer_files = (
        *("tokenizer.model", "tokenizer.model.v3", "qwen.tiktoken", "bpe.codes"),
        *("chat_template.jinja", "processor_config.json", "vocab_index.json"),
        "additional_chat_templates/tool_use.jinja",
    )
    (folder / "additional_chat_templates").mkdir()
    for name in (*ours, *weights, *tokenizer_files, ".hidden.json", "my notes.txt"):
        (folder / name).write_text("{}")
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    tokenizer.vocab_files_names = {"merges_file": "bpe.codes"}
    files = models.companion_files(folder, tokenizer)
    plain = {path.name for path in models.EMBEDDED.glob("*.json")}
    assert files.keys() == {*plain, *tokenizer_files}
    atomic_files.write_folder(folder / "step", files, {})
    assert atomic_files.read_manifest(folder / "step").files.keys() == files.keys()


@pytest.mark.parametrize(
    ("name", "values", "change_text"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, r"chat_template=\w{16} -> "),
        ("generation_config.json", {"eos_token_id": 0}, "end_tokens=2 -> end_tokens=0,2"),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": ["<t>"]},
            "vocab_size=468 -> ",
        ),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, r"tokens_of_a_text=\w{16} -> "),
    ],
)
def test_identity_names_what_differs(
    folder: Path, name: str, values: dict[str, Any], change_text: str
) -> None:
    before = models.tokenizer_identity(folder, models.load_tokenizer(folder))
    change(folder, name, **values)
    now = models.tokenizer_identity(folder, models.load_tokenizer(folder))
    assert models.tokenizer_changes(before, before) == ""
    assert models.tokenizer_changes(None, now) == models.tokenizer_changes(before, None) == ""
    changes = models.tokenizer_changes(before, now)
    assert re.match(change_text, changes)
