from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TINY, VOCAB_SIZE, tiny_model
from safetensors.torch import save_file

from peralta_zmq import atomic_files, models
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import lora
from peralta_zmq.rollout import Message

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Any:
    return tiny_model()


def plain_logprob(model: Any, ids: list[int], t: int, temperature: float = 1.0) -> float:
    """log p(token t | tokens before t), from a forward pass over those tokens alone."""
    logits = model(input_ids=torch.tensor([ids[:t]])).logits[0, -1] / temperature
    return float(logits.log_softmax(-1)[ids[t]])


# Scoring.


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprob_of_a_token_is_given_by_the_tokens_before_it(
    model: Any, temperature: float
) -> None:
    ids = [5, 9, 33, 2, 17, 60]
    with torch.no_grad():
        ours = models.token_logprobs(
            model, torch.tensor([ids]), torch.ones(1, 6, dtype=torch.int64), temperature=temperature
        )[0]
        plain = [plain_logprob(model, ids, t, temperature) for t in range(1, 6)]
    assert ours[1:].tolist() == pytest.approx(plain, abs=1e-5)


def test_each_token_may_have_a_temperature_of_its_own(model: Any) -> None:
    ids, temperatures = [5, 9, 33, 2], [9.0, 0.5, 1.0, 2.0]
    with torch.no_grad():
        ours = models.token_logprobs(
            model, torch.tensor([ids]), torch.ones(1, 4), temperature=torch.tensor([temperatures])
        )[0]
        plain = [plain_logprob(model, ids, t, temperatures[t]) for t in range(1, 4)]
    assert ours.tolist() == pytest.approx([0, *plain], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_temperature_for_all_is_the_same_to_the_bit(model: Any, temperature: float) -> None:
    ids = torch.tensor([[5, 9, 33, 2]])
    every = torch.full(ids.shape, temperature)
    one, all_alike = (
        models.token_logprobs(model, ids, torch.ones_like(ids), temperature=each)
        for each in (temperature, every)
    )
    assert torch.equal(one, all_alike)


def test_first_token_has_logprob_zero_and_none_is_lost(model: Any) -> None:
    ids = torch.tensor([[5, 9, 33], [7, 8, 2]])
    logprobs = models.token_logprobs(model, ids, torch.ones_like(ids))
    assert logprobs.shape == ids.shape
    assert logprobs[:, 0].tolist() == [0, 0]
    assert (logprobs[:, 1:] < 0).all()


def test_padding_on_the_right_does_not_change_the_tokens_before_it(model: Any) -> None:
    with torch.no_grad():
        short = models.token_logprobs(model, torch.tensor([[5, 9, 33]]), torch.ones(1, 3))
        long = models.token_logprobs(
            model, torch.tensor([[5, 9, 33, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
        )
    assert long[0, :3].tolist() == pytest.approx(short[0].tolist(), abs=1e-6)


def test_selected_logprobs_are_those_of_the_softmax_by_hand() -> None:
    # p = 1/4, 1/4, 1/2 at T 1; at T .5 the squares: 1/6, 1/6, 4/6
    logits = torch.tensor([0.0, 0.0, math.log(2)])
    third = torch.tensor(2)
    assert models.selected_logprobs(logits, third).item() == pytest.approx(math.log(1 / 2))
    cool = models.selected_logprobs(logits, third, temperature=0.5).item()
    assert cool == pytest.approx(math.log(4 / 6))


def test_selected_logprobs_are_computed_in_fp32() -> None:
    logits = torch.tensor([20.0, 0.0], dtype=torch.bfloat16)
    assert models.selected_logprobs(logits, torch.tensor(1)).dtype == torch.float32


# Weights in place.


def changed(model: Any, **replaced: Any) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes, with some of them replaced, or left out when None."""
    weights = {name: tensor + 1 for name, tensor in models.weights_of(model).items()}
    for name, tensor in replaced.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    return weights


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: Any, before: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_are_copied_into_the_live_tensors(model: Any) -> None:
    live = models.weights_of(model)
    wanted = changed(model)
    models.apply_weights(model, wanted)
    assert all(torch.equal(live[name], wanted[name]) for name in live)


def test_narrow_weights_are_widened_exactly(model: Any) -> None:
    wanted = {name: tensor.bfloat16() for name, tensor in changed(model).items()}
    models.apply_weights(model, wanted)
    live = models.weights_of(model)
    assert all(torch.equal(live[name], tensor.float()) for name, tensor in wanted.items())


NORM = "model.norm.weight"  # the last tensor, so that those before it would have been copied
BROKEN: dict[str, dict[str, Any]] = {
    "missing": {NORM: None},
    "unknown name": {"model.extra.weight": torch.ones(16)},
    "renamed": {NORM: None, "model.norm.bias": torch.ones(16)},
    "wrong shape": {NORM: torch.ones(17)},
    "same size, other shape": {NORM: torch.ones(4, 4)},
    "broadcastable": {NORM: torch.ones(1)},
    "integers": {NORM: torch.ones(16, dtype=torch.int64)},
}


@pytest.mark.parametrize("how", list(BROKEN))
def test_broken_weights_leave_every_tensor_untouched(model: Any, how: str) -> None:
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"model\."):
        models.apply_weights(model, changed(model, **BROKEN[how]))
    assert unchanged(model, before)


def test_lazy_weights_are_taken_one_at_a_time(model: Any) -> None:
    weights = changed(model)

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return weights[name].clone()

        def __iter__(self) -> Iterator[str]:
            return iter(weights)

        def __len__(self) -> int:
            return len(weights)

    models.apply_weights(model, Lazy())
    assert torch.equal(models.weights_of(model)[NORM], weights[NORM])


def test_tied_embedding_is_published_once(model: Any) -> None:
    names = models.weights_of(model).keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_untied_head_is_published_too() -> None:
    names = models.weights_of(tiny_model(tie_word_embeddings=False)).keys()
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names


def test_tied_head_follows_the_embedding(model: Any) -> None:
    wanted = changed(model)
    models.apply_weights(model, wanted)
    assert torch.equal(model.lm_head.weight, wanted["model.embed_tokens.weight"])


def test_names_are_those_that_transformers_saves(model: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == models.weights_of(model).keys()


def test_new_model_follows_its_seed() -> None:
    first, again, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert unchanged(first, again.state_dict()) and not unchanged(first, other.state_dict())


# Folders.


def test_embedded_model_is_a_folder_of_the_package() -> None:
    assert models.model_folder("embedded") == models.EMBEDDED


def test_embedded_base_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in models.EMBEDDED.iterdir()) <= 5_000_000


def test_embedded_base_loads_by_the_path_of_every_model() -> None:
    model = models.load_model(models.EMBEDDED, device=CPU, dtype=torch.float32)
    assert model.config.model_type == "qwen3" and not model.training
    assert len(models.load_tokenizer(models.EMBEDDED)) <= model.config.vocab_size


def test_model_that_is_nowhere_says_how_to_fetch_it() -> None:
    with pytest.raises(ConfigError, match=r"'nobody/nothing' is neither.*hf download"):
        models.model_folder("nobody/nothing")


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c/d", "~nobody/models", "bad name!"])
def test_name_that_can_be_no_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is neither a folder nor"):
        models.model_folder(name)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        models.model_folder(str(tmp_path))


def written(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**TINY, **settings}), "utf-8")
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        models.load_model(folder, device=CPU, dtype=torch.float32)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text
    return text


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "cannot be loaded" in refused(written(tmp_path))


@pytest.mark.parametrize("text", ["not json", "{}", "[]", '{"model_type": "nonesuch"}'])
def test_config_of_no_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, "utf-8")
    assert "cannot be loaded" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, -10])
def test_truncated_weights_are_refused(tmp_path: Path, model: Any, keep: int) -> None:
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "cannot be loaded" in refused(tmp_path)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path)
    weights = models.weights_of(model)
    del weights[NORM]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert refused(tmp_path).endswith(f"tensor {NORM} is missing")


def test_weights_of_another_width_are_refused(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path)
    weights = {**models.weights_of(model), NORM: torch.ones(17)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "cannot be loaded" in refused(tmp_path)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        models.load_tokenizer(written(tmp_path))


def test_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    for file in models.EMBEDDED.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(ConfigError, match="chat template"):
        models.load_tokenizer(tmp_path)


def test_companions_are_all_but_the_weights() -> None:
    names = models.companion_files(models.EMBEDDED).keys()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if "safetensors" in name]


def test_companions_are_only_files_that_a_version_may_hold(tmp_path: Path) -> None:
    for name in (".hidden.json", "my notes.txt", "config.json", "model.safetensors.index.json"):
        (written(tmp_path) / name).write_text("{}")
    files = models.companion_files(tmp_path)
    atomic_files.write_folder(tmp_path / "step_000001", files, {})
    assert set(atomic_files.read_manifest(tmp_path / "step_000001").files) == {"config.json"}


# Prompts.


def test_prompt_ends_where_the_assistant_begins() -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    ids = models.chat_prompt(tokenizer, [Message("system", "add"), Message("user", "1 plus 2")])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n1 plus 2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# Devices.


def test_unknown_device_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'toaster' cannot be used.*try 'auto'"):
        models.choose_device("toaster")


def test_cpu_is_always_there() -> None:
    assert models.choose_device("cpu") == CPU


def test_named_dtype_is_taken_as_it_is() -> None:
    assert models.choose_dtype(CPU, "float32") == (torch.float32, "set by model.dtype")


@pytest.mark.parametrize(
    ("kind", "has_bf16", "dtype", "reason"),
    [
        ("cpu", True, torch.bfloat16, "this CPU multiplies bfloat16"),
        ("cpu", False, torch.float32, "this CPU reports no bfloat16"),
        ("cuda", True, torch.bfloat16, "this GPU multiplies bfloat16"),
        ("cuda", False, torch.float16, "this GPU has no bfloat16"),
        ("mps", False, torch.float16, "half the memory of float32 on mps"),
    ],
)
def test_auto_takes_the_narrowest_dtype_that_the_device_multiplies(
    kind: str, has_bf16: bool, dtype: torch.dtype, reason: str
) -> None:
    assert models.native_dtype(kind, has_bf16=has_bf16) == (dtype, f"auto: {reason}")


@pytest.mark.parametrize(
    ("cpuinfo", "has_bf16"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 sha_ni\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n", True),
        ("flags\t\t: fpu sse2 avx2 avx512f avx512dq avx512vl\n", False),  # by emulation only
        ("Features\t: fp asimd fphp asimdhp sve i8mm bf16 dgh rng\n", True),  # Neoverse V1
        ("Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp\n", False),  # Neoverse N1
        ("", False),
    ],
)
def test_bfloat16_is_seen_in_what_linux_says_of_x86_and_arm(cpuinfo: str, has_bf16: bool) -> None:
    assert models.multiplies_bf16(cpuinfo) == has_bf16


def test_auto_on_this_machine_goes_by_what_it_tells() -> None:
    told = Path("/proc/cpuinfo")
    seen = models.multiplies_bf16(told.read_text("utf-8") if told.exists() else "")
    assert models.choose_dtype(CPU) == models.native_dtype("cpu", has_bf16=seen)


def test_tiny_model_speaks_the_whole_vocabulary(model: Any) -> None:
    assert models.weights_of(model)["model.embed_tokens.weight"].shape[0] == VOCAB_SIZE


def test_peft_that_is_missing_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora\.rank needs peft .*pip install .*\[lora\]"):
        lora.add_adapters(tiny_model(), rank=2, alpha=4)
