"""Entry points: exit codes, one-line errors, --help without torch, Python to use, open files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from config_files import REPO

from peralta_zmq.config import Config, load_config
from peralta_zmq.config.load import help_text
from peralta_zmq.config.programs import raise_open_files_limit, run_program
from peralta_zmq.config.schema import section_models
from peralta_zmq.config.sections import default_text, row_model_of
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.errors import ConfigError, WireError

PROGRAMS = (
    *("trainer", "generator", "lan", "verifier"),
    *("evaluate", "replay", "doctor", "dashboard"),
)
WITH_SETTINGS = ("trainer", "generator", "lan", "verifier", "evaluate", "doctor")
FILES = resource.RLIMIT_NOFILE


def exit_code(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, error: BaseException | None = None
) -> int:
    """Return the exit code of a program that raises `error`, or does nothing."""

    def main(config: Config) -> None:
        if error:
            raise error

    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    commands = ("local", "chaos") if "local" in arguments or "remote" in arguments else ()
    return run_program(main, "bin/x", commands=commands)


@pytest.mark.parametrize(("arguments", "error", "code", "message"), [
    ([], None, 0, ""),
    (["local", "--train.max-steps", "3"], None, 0, ""),
    (["--train.batch-size", "50"], None, 2,
     "train.batch_size 50 is not a multiple of sampling.num_generations 8; use 48 or 56"),
    (["remote"], None, 2, "'remote' is not a command; write bin/x local or bin/x chaos"),
    ([], WireError("port 5555 is taken"), 2, "port 5555 is taken"),
    ([], KeyboardInterrupt(), 130, ""),
])  # fmt: skip
def test_run_program_prints_errors_and_returns_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *,
    arguments: list[str], error: BaseException | None, code: int, message: str,
) -> None:  # fmt: skip
    assert exit_code(monkeypatch, *arguments, error=error) == code
    assert capsys.readouterr().err == (f"bin/x: error: {message}\n" if message else "")


def test_program_escapes_control_characters_in_logs_and_errors() -> None:
    code = """
import logging, sys
from peralta_zmq.config.programs import run_plain_program
from peralta_zmq.errors import WireError

def main(arguments):
    logging.getLogger("peralta_zmq.x").warning("refused %s", sys.argv[1])
    raise WireError(sys.argv[1])

run_plain_program(main, "bin/x")
"""
    command = [sys.executable, "-c", code, "ann\x1b]0;owned\x07"]
    result = subprocess.run(command, capture_output=True, text=True)
    logged, error = result.stderr.splitlines()
    assert logged.endswith(r" bin/x refused ann\x1b]0;owned\x07")
    assert error == r"bin/x: error: ann\x1b]0;owned\x07"


def test_run_program_does_not_hide_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(monkeypatch, error=ZeroDivisionError())


def test_help_lists_commands() -> None:
    printed = help_text("bin/x", ("local", "chaos"))
    assert printed.startswith("usage: bin/x {local,chaos} [@ FILE.toml ...]")
    assert "\n  bin/x local @ configs/demo.toml --train." in printed


def run_and_list_imports(name: str, *arguments: str, command: str = "") -> tuple[str, str]:
    """The output of a program, and its exit code with the large libraries that it imported.

    `command` is the name by which the program is started, if it is not bin/NAME.
    """
    code = f"""
import sys
sys.argv = {[command or f"bin/{name}", *arguments]!r}
sys.path.insert(0, {str(REPO)!r})
from peralta_zmq.config import programs
try:
    sys.exit(programs.{name}())
except SystemExit as error:
    large = {{"torch", "transformers", "numpy", "zmq"}} & set(sys.modules)
    print(error.code, sorted(large), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return result.stdout, result.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_help_lists_the_sections_on_a_page_without_large_imports(name: str) -> None:
    """No numeric or network library is imported, so that it takes a third of a second."""
    printed, ended = run_and_list_imports(name, "--help")
    assert ended == "0 []"
    lines = printed.splitlines()
    assert len(lines) <= 80
    for section in (*section_models(), "env"):
        assert [line for line in lines if line.startswith(f"  {section} ")], section
    assert f"bin/{name} --help train  " in printed and f"bin/{name} --version  " in printed


@pytest.mark.parametrize("section", [*section_models(), "env"])
def test_help_of_a_section_lists_all_its_settings(section: str) -> None:
    model = {**section_models(), "env": EnvSection}[section]
    words = " ".join(help_text("bin/trainer", topic=section).split())
    assert words.startswith(f"[{section}] {model.__doc__.split()[0]} ")
    for leaf, field in model.model_fields.items():
        if row_model_of(field) is None:
            flag = leaf if section == "env" else f"--{section}.{leaf}".replace("_", "-")
            assert " ".join(f"{flag} {default_text(field)} {field.description}".split()) in words


@pytest.mark.parametrize(("word", "flags"), [
    ("learning_rate", {"--train.learning-rate"}),
    ("--train.learning-rate", {"--train.learning-rate"}),
    ("NUCLEUS", {"--sampling.top-p"}),
])  # fmt: skip
def test_help_of_a_word_lists_the_settings_that_have_it(word: str, flags: set[str]) -> None:
    listed = {line.split()[0] for line in help_text("bin/x", topic=word).splitlines()
              if line.startswith("  --")}  # fmt: skip
    assert flags <= listed and len(listed) < 9


def test_help_of_an_unknown_word_names_a_similar_one() -> None:
    assert run_and_list_imports("trainer", "--help", "lernin")[1] == "2 []"
    with pytest.raises(ConfigError, match=r"did you mean bin/x --help temperature\? bin/x"):
        help_text("bin/x", topic="temperatrue")


def test_help_of_a_command_may_have_a_topic() -> None:
    printed, ended = run_and_list_imports("lan", "local", "--help", "loss")
    assert ended == "0 []"
    assert "--loss.epsilon-high " in printed and "objectives, per token:" in printed


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_prints_its_version(name: str) -> None:
    for arguments in (["--version"], ["@", "missing.toml", "--version"]):
        assert run_and_list_imports(name, *arguments) == (f"bin/{name} {version()}\n", "0 []")


def version() -> str:
    return metadata.version("peralta_zmq")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_names_the_command_and_imports_no_torch(name: str) -> None:
    for command in (f"bin/{name}", f"/venv/bin/peralta-{name}"):
        printed, ended = run_and_list_imports(name, "--help", command=command)
        assert printed.startswith(f"usage: {command.removeprefix('/venv/bin/')} ")
        assert ended == ("0 ['numpy']" if name == "dashboard" else "0 []")


def test_remedy_names_the_installed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/peralta-trainer"])
    with pytest.raises(ConfigError, match="make them with peralta-doctor keygen"):
        load_config("peralta-trainer", ["--wire.bind", "0.0.0.0"])


@pytest.mark.parametrize("name", ["trainer", "generator"])
def test_wrong_setting_exits_before_torch_is_imported(name: str) -> None:
    assert run_and_list_imports(name, "--train.batch-size=50")[1] == "2 []"


def test_program_reexecutes_with_python_of_checkout(tmp_path: Path) -> None:
    """Started by a Python without the libraries (-S hides site-packages), from anywhere."""
    if not (REPO / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv in this checkout")
    plain = getattr(sys, "_base_executable", sys.executable)
    command = [plain, "-S", str(REPO / "bin/trainer"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.startswith("usage: bin/trainer ")


@pytest.mark.parametrize("name", (*PROGRAMS, "bench"))
def test_program_starts_with_a_safe_path(name: str, tmp_path: Path) -> None:
    """Python does not add the script's folder to sys.path."""
    result = subprocess.run(
        [sys.executable, str(REPO / "bin" / name), "--help"], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONSAFEPATH": "1"}, timeout=50,
    )  # fmt: skip
    assert result.stdout.startswith(f"usage: bin/{name} "), result.stderr


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_launch_replaces_only_its_own_folder_in_sys_path(tmp_path: Path, safe_path: str) -> None:
    shutil.copytree(REPO / "bin", tmp_path / "bin")
    script, other = tmp_path / "bin" / "doctor", str(tmp_path / "other")
    entry_point = "peralta_zmq.config.programs:doctor"
    script.write_text(script.read_text().replace(entry_point, "probe:main"))
    (tmp_path / "probe.py").write_text("import sys\ndef main(): print(*sys.path[:2], sep='\\n')")
    environment = {**os.environ, "PYTHONPATH": other, "PYTHONSAFEPATH": safe_path}
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=50
    )
    assert result.stdout.splitlines() == [str(tmp_path), other], result.stderr


def test_launch_names_a_file_that_hides_a_module_of_python(tmp_path: Path) -> None:
    shutil.copytree(REPO / "bin", tmp_path / "bin")
    (tmp_path / "random.py").touch()
    result = subprocess.run(
        [sys.executable, str(tmp_path / "bin" / "doctor")], capture_output=True, text=True
    )
    reason = f"{tmp_path}/random.py hides a module of Python; rename it"
    assert result.stderr == f"bin/doctor: error: {reason}\n"


def run_in_shell(shell: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of bin/ as "$@" in a line of shell."""
    command = ["/bin/sh", "-c", shell, "sh", sys.executable, str(REPO / "bin" / words[0])]
    return subprocess.run([*command, *words[1:]], capture_output=True, text=True, timeout=50,
                          env={**os.environ, **environment})  # fmt: skip


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [*((name, "--version") for name in PROGRAMS), ("doctor", "plan")])
def test_program_ends_quietly_when_nothing_reads_its_output(
    words: tuple[str, ...], unbuffered: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, str(REPO / "bin" / words[0]), *words[1:]], stdout=writing,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, timeout=50,
    )  # fmt: skip
    os.close(writing)
    assert result.returncode in (0, 141) and result.stderr == b""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_program_runs_without_standard_streams(closed: str) -> None:
    shell = f'exec "$@" {closed}'
    assert run_in_shell(shell, "doctor", "--help").returncode == 0
    assert run_in_shell(shell, "trainer", "--train.batch-size=50").returncode == 2


@pytest.mark.parametrize("environment", [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
])  # fmt: skip
def test_output_escapes_what_its_encoding_lacks(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[train]\noptim = "\xfc"\n', "utf-8")
    shell, problem = 'exec "$@" 2>&1', r"train.optim = '\xfc' is wrong"
    result = run_in_shell(shell, "doctor", "@", str(file), **environment)
    assert result.returncode == 1 and result.stdout.startswith(f"FAIL  config    {problem}")
    result = run_in_shell(shell, "trainer", "@", str(file), **environment)
    assert result.returncode == 2 and result.stdout.startswith(f"bin/trainer: error: {problem}")


def test_raise_open_files_limit_raises_the_soft_limit(open_file_limits: tuple[int, int]) -> None:
    resource.setrlimit(FILES, (512, open_file_limits[1]))
    raise_open_files_limit()
    raised, hard = resource.getrlimit(FILES)
    assert hard == open_file_limits[1] and raised in {open_file_limits[1], 65_536, 10_240}
    raise_open_files_limit()
    assert resource.getrlimit(FILES) == (raised, hard)  # a higher limit stays
