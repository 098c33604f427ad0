"""The dry run: which prompts are left out, and which are refused, with rows and remedies."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from user_modules import UserModules

from peralta_zmq import models
from peralta_zmq.build import dry_run, open_environments
from peralta_zmq.config import Config, load_config
from peralta_zmq.environments import calculator
from peralta_zmq.environments.dataset import Environments, load_problems
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.memory import Role
from peralta_zmq.operate import doctor
from peralta_zmq.rollout import Message, Problem
from peralta_zmq.trainer.trainer import Trainer

CHAT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
ONE_SYSTEM = (
    "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
    "{{ raise_exception('two system messages') }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
TASK = """
from peralta_zmq.rollout import Message, Problem

CHATS = {chats!r}

def problems(split, seed):
    for number, chat in enumerate(CHATS):
        tokens, messages = ((), chat) if isinstance(chat, list) else (chat, [])
        yield Problem(str(number), "own", tuple(Message(*each) for each in messages), "1", tokens)

def reward(problem, text):
    return 1.0
"""
LONG = "9 8 " * 220
LENGTHS = ("--engine.max-model-len=512", "--sampling.max-completion-length=48")


@pytest.fixture
def config_with(tmp_path: Path, user_modules: UserModules) -> Callable[..., Config]:
    """A config whose task has the chats: (role, content) of each message, or token ids."""

    def config(chats: Sequence[Any], *words: str) -> Config:
        user_modules.forget()
        user_modules.write("own.task", TASK.format(chats=list(chats)))
        chosen = ("--task.name=own.task", f"--run.dir={tmp_path}")
        return load_config("bin/x", [*chosen, "--dashboard.port=None", *LENGTHS, *words])

    return config


def users(*texts: str) -> list[list[tuple[str, str]]]:
    return [[("user", text)] for text in texts]


def model(folder: Path, *, template: str = CHAT, **sizes: Any) -> str:
    """--model.name of the embedded model with another template and other sizes, and no weights."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED / name, folder)
    for name, values in (
        ("config.json", sizes), ("tokenizer_config.json", {"chat_template": template}),
    ):  # fmt: skip
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps(content))
    return f"--model.name={folder}"


def usable(config: Config, split: dry_run.Split = "train") -> Environments:
    reader = dry_run.PromptReader.of(config)
    with closing(open_environments(config, split)) as environments:
        return dry_run.usable_environments(config, environments, split, reader)


def refusal(config: Config, split: dry_run.Split = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        usable(config, split)
    (line,) = str(caught.value).splitlines()
    return line


def test_long_prompts_are_skipped_with_row_length_and_remedy(
    config_with: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_with(users("one", LONG, "two", LONG + "2", LONG, LONG))
    environments = usable(config)
    assert [problem.question for problem in environments.problems] == ["one", "two"]
    assert environments.sizes == {"own.task": 2}
    (warning,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warning == (
        "training environment 'own.task': 4 of 6 prompts do not fit into 512 tokens with a "
        "completion of 48 and are skipped: row 2 (888 tokens), row 4 (889 tokens), row 5 "
        "(888 tokens) and 1 more; shorten them, or raise engine.max_model_len to 937"
    )


def test_rows_of_a_file_are_its_line_numbers(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text(f'natural_language,python_expression\none,1\n"t\nwo",2\n{LONG},3\n')
    config = load_config(
        "bin/x",
        ["--task.name=calculator", f"--data.train={file}", "--data.overlong=refuse", *LENGTHS],
    )
    assert "1 of 3 prompts do not fit into 512 tokens" in refusal(config)
    assert ": row 5 (" in refusal(config)


def test_trainer_and_generators_number_the_remaining_problems_alike(
    config_with: Callable[..., Config], tmp_path: Path
) -> None:
    """A generator has the tokenizer of a published version, in another folder."""
    config = config_with(users("a", LONG, "b", " ", "c"))
    trainers = usable(config)
    folder = tmp_path / "copy"
    shutil.copytree(models.EMBEDDED, folder)
    reader = dry_run.PromptReader.of(config, models.load_tokenizer(folder))
    with closing(open_environments(config, "train")) as environments:
        generators = dry_run.usable_environments(config, environments, "train", reader)
        assert environments.digest != generators.digest == trainers.digest
    assert generators.problems == trainers.problems


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("overlong", ["skip", "refuse"])
def test_environment_without_a_short_prompt_is_refused(
    config_with: Callable[..., Config], overlong: str, split: dry_run.Split
) -> None:
    line = refusal(config_with(users(LONG, LONG), f"--data.overlong={overlong}"), split)
    assert "environment 'own.task': 2 of 2 prompts do not fit into 512 tokens" in line
    assert "raise engine.max_model_len to 936" in line


@pytest.mark.parametrize(("sizes", "texts", "reasons"), [
    ({"max_position_embeddings": 100}, ("one", "9 8 " * 20),
     ("1 of 2 prompts do not fit into 100 tokens with a completion of 48",
      "shorten them: the model reads 100 tokens")),
    ({"vocab_size": 200}, ("1",),
     ("1 of 1 prompts have tokens that are not among the 200 of the model: row 1 (",
      "resize the embeddings to the tokenizer (resize_token_embeddings)")),
    ({"template": "<|im_start|>"}, ("1", "2"),
     ("2 of 2 prompts have special tokens only: row 1 ('<|im_start|>')",)),
    *(({"template": template}, ("1", "2"),
       ("prompts do not depend on the message of the user; copy all tokenizer files",))
      for template in ("Question:\n", "{{ messages[0].role }}")),
])  # fmt: skip
def test_prompts_that_do_not_fit_the_model_are_refused(
    config_with: Callable[..., Config], tmp_path: Path, sizes: dict[str, Any],
    texts: tuple[str, ...], reasons: tuple[str, ...],
) -> None:  # fmt: skip
    name = model(tmp_path / "m", **sizes)
    line = refusal(config_with(users(*texts), name, "--data.overlong=refuse"))
    assert all(reason in line for reason in reasons)


def test_completions_of_each_split_need_their_own_room(
    config_with: Callable[..., Config],
) -> None:
    """The prompt of 5 tokens around the text, and 100 of the text."""
    reader = dry_run.PromptReader.of(load_config("bin/x", []))
    length = len(models.chat_prompt(reader.tokenizer, [Message("user", "9 8 " * 30)]))
    chats = users("one", "9 8 " * 30)
    for words, num_train, num_eval in (
        ((f"--engine.max-model-len={length + 48}",), 2, 2),
        ((f"--engine.max-model-len={length + 47}",), 1, 1),
        (
            (f"--engine.max-model-len={length + 48}", "--eval.sampling.max-completion-length=49"),
            2,
            1,
        ),
        ((f"--engine.max-model-len={length + 1}", "--sampling.max-completion-length=None"), 2, 2),
        ((f"--engine.max-model-len={length}", "--sampling.max-completion-length=None"), 1, 1),
    ):
        config = config_with(chats, *words)
        assert len(usable(config).problems) == num_train
        assert len(usable(config, "eval").problems) == num_eval


@pytest.mark.parametrize(
    ("template", "chat", "reason", "remedy"),
    [
        (NO_SYSTEM + CHAT, [("system", "add"), ("user", "1")], "no system",
         "correct the messages or remove data.system_prompt"),
        (ONE_SYSTEM + CHAT, [("system", "a"), ("system", "b"), ("user", "1")],
         "two system messages", "correct the messages"),
        (ALTERNATING + CHAT, [("user", "1"), ("user", "2")], "roles must alternate",
         "correct the messages"),
        ("{{ messages[0].content + 1 }}", [("user", "1")], "can only concatenate str",
         "correct the messages"),
        ("{{ messages[7].content.text }}", [("user", "1")], "", "correct the messages"),
        ("{{ 1 // (messages | length - 1) }}", [("user", "1")], "integer division or modulo by",
         "correct the messages"),
        ("{% if %}", [("user", "1")], "Expected an expression", "correct the messages"),
    ],
)  # fmt: skip
def test_prompt_that_the_template_refuses_is_named(
    config_with: Callable[..., Config], tmp_path: Path, template: str, chat: Any, reason: str,
    remedy: str,
) -> None:  # fmt: skip
    name = model(tmp_path / "m", template=template)
    line = refusal(config_with([chat], name))
    assert f"1 of 1 prompts are refused by the chat template: row 1 ({reason}" in line
    assert f"; {remedy}" in line


def test_template_that_drops_the_system_message_is_only_noted(
    config_with: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = model(tmp_path / "m", template="{{ messages[-1].content }}")
    usable(config_with([[("system", "add"), ("user", "1")]], name))
    assert "prompts do not depend on the message of the system" in caplog.text


@pytest.mark.parametrize("token", [468, -1, 1 << 40])
def test_token_ids_of_another_tokenizer_are_refused(
    config_with: Callable[..., Config], token: int
) -> None:
    line = refusal(config_with([(1, 2), (1, token)]))
    assert f"not among the 468 of the model: row 2 (token {token});" in line
    assert "make input_token_ids with the tokenizer of this model" in line


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_empty_prompt_is_skipped_unless_all_are_empty(
    config_with: Callable[..., Config], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(usable(config_with(users("1", text))).problems) == 1
    assert "1 of 2 prompts are empty and are skipped: row 2; fill them in" in caplog.text
    assert "1 of 1 prompts are empty: row 1;" in refusal(config_with(users(text)))


@pytest.mark.parametrize("content", [[{"type": "image", "url": "x.png"}], None, b"1", "\ud800"])
def test_content_that_is_no_text_is_refused_with_its_row(content: Any) -> None:
    (first, *_) = calculator.problems("train", 0)

    def problems(split: str, seed: int) -> Any:
        return iter([first, Problem("2", "own", (Message("user", content),), "1")])

    with pytest.raises(TaskError) as caught:
        load_problems(problems, "train", seed=0, options={})
    assert str(caught.value) == (
        f"row 2 of the problems for 'train' has {content!a} as text; prompts and answers must be "
        "valid text, without images or other parts"
    )


def test_variable_that_the_template_lacks_is_refused(config_with: Callable[..., Config]) -> None:
    config = config_with(users("1"), '--data.chat-template-kwargs={"thinking": true}')
    assert "data.chat_template_kwargs.thinking is not a variable of the model's" in refusal(config)


def test_batches_of_prompts_have_the_tokens_of_single_prompts() -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    problems = load_problems(calculator.problems, "train", seed=0, options={})[:300]
    problems[7] = replace(problems[7], input_token_ids=(5, 9))
    expected = [models.chat_prompt(tokenizer, problem.messages) for problem in problems]
    expected[7] = [5, 9]
    assert list(models.chat_prompts(tokenizer, problems)) == expected


def test_trainer_refuses_prompts_before_it_writes(
    config_with: Callable[..., Config], tmp_path: Path
) -> None:
    config = config_with(users("1", LONG), "--data.overlong=refuse")
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"1 of 2 prompts do not fit"):
        Trainer(config, stack)
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(("name", "is_checked"), [("embedded", True), ("no/such-model", False)])
def test_verifier_logs_the_prompts_that_the_trainer_skips(
    config_with: Callable[..., Config], caplog: pytest.LogCaptureFixture, name: str,
    is_checked: bool,
) -> None:  # fmt: skip
    config = config_with(users("1", LONG), f"--model.name={name}")
    with closing(Verifier(config, host="127.0.0.1", port=0, token=None)) as verifier:
        verifier.log_dry_run(config)
        assert verifier.environments == {"own.task": 2}
    assert ("1 of 2 prompts do not fit into 512 tokens" in caplog.text) is is_checked


@pytest.mark.parametrize("command", [["--role=trainer"], ["--role=generator"], ["plan"]])
def test_doctor_and_plan_print_the_dry_run(
    config_with: Callable[..., Config], tmp_path: Path, command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config_with(users("1", LONG))
    words = ["--task.name=own.task", f"--run.dir={tmp_path}"]
    words += LENGTHS
    doctor.main([*command, *words])
    out = capsys.readouterr().out
    assert "note  prompts   training environment 'own.task': 1 of 2 prompts do not fit" in out
    assert "ok    end token a completion ends with '<|im_end|>' (2)\n" in out
    assert doctor.main([*command, *words, "--data.overlong=refuse"]) == 1
    assert "FAIL  prompts   held-out environment 'own.task': 1 of 2 " in capsys.readouterr().out


def findings_of(*words: str, role: Role = "generator") -> list[dry_run.Finding]:
    config = load_config("doctor", list(words))
    return list(dry_run.check_run(config, role, with_weights=False, with_prompts=False))


def test_engine_is_reported_with_the_reason() -> None:
    engine, *_ = findings_of("--engine.name=hf")
    assert engine == dry_run.Finding("engine", "hf (set by engine.name)")
    automatic, *_ = findings_of()
    assert re.fullmatch(r"(native|mlx|vllm) \(auto: .+\)", automatic.detail)


def test_engine_that_cannot_run_is_a_fault_of_a_generator_only(tmp_path: Path) -> None:
    words = ("--engine.name=hf", "--engine.quantize=4")
    engine, *_ = findings_of(*words)
    assert engine.is_fatal and engine.detail.startswith("engine.quantize 4 is not an option of")
    engine, *_ = findings_of(*words, role="trainer")
    assert not engine.is_fatal and engine.remedy.startswith("remove it or set engine.name")


def test_generator_without_the_model_checks_its_engine_only() -> None:
    (engine,) = findings_of("--model.name=no/such-model")
    assert engine.name == "engine"
    for words, role in (((), "trainer"), (("--lora.rank=4",), "generator")):
        with pytest.raises(ConfigError, match="neither a folder nor in the Hugging Face cache"):
            findings_of("--model.name=no/such-model", *words, role=role)


def test_context_beyond_a_change_of_the_rotary_embedding_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    name = model(tmp_path / "m", max_position_embeddings=256, rope_parameters=rope)
    assert all(finding.name != "model" for finding in findings_of(name))
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    name = model(tmp_path / "n", max_position_embeddings=256, rope_parameters=rope)
    (finding,) = (finding for finding in findings_of(name) if finding.name == "model")
    assert finding.is_fatal and finding.remedy == "set engine.max_model_len to at most 128"
    short = findings_of(name, "--engine.max-model-len=128")
    assert all(finding.name != "model" for finding in short)


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_engine_that_lacks_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bigbird"}')
    config = load_config("doctor", ["--engine.name=mlx", f"--model.name={tmp_path}"])
    findings = dry_run.check_run(config, "generator", with_weights=False, with_prompts=False)
    assert "engine 'mlx' has no model 'bigbird'" in next(findings).detail


def test_model_without_end_token_is_noted(tmp_path: Path) -> None:
    model(tmp_path / "m", eos_token_id=None)
    tokenizer = models.load_tokenizer(tmp_path / "m")
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    finding = dry_run.check_end_tokens(tokenizer)
    assert "has no end token" in finding.detail and "set eos_token_id" in finding.remedy


def test_end_tokens_that_differ_are_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not if they agree: then there is no news."""
    model(tmp_path / "m", eos_token_id=2)
    tokenizer = models.load_tokenizer(tmp_path / "m")
    with caplog.at_level("INFO"):
        dry_run.log([dry_run.check_end_tokens(tokenizer)])
        assert not caplog.records
        model(tmp_path / "other", eos_token_id=0)
        dry_run.log([dry_run.check_end_tokens(models.load_tokenizer(tmp_path / "other"))])
    (record,) = caplog.records
    assert record.levelname == "INFO" and "end tokens differ, any of them" in record.message
