"""Names of plug-ins."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from user_modules import UserModules

from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import TABLES, Kind, resolve

GOOD_TASK = """
def problems(split, seed, **options): ...
def reward(problem, completion_text): return 1.0
"""


@pytest.fixture
def lab(tmp_path: Path, user_modules: UserModules) -> Path:
    """A user's package, importable as `my_lab`."""
    user_modules.write("my_lab.__init__", "")
    return tmp_path / "my_lab"


@pytest.mark.parametrize(("prefix", "library", "extra"), [
    ("reasoning_gym", "reasoning_gym", "reasoning-gym"),
    ("verifiers", "verifiers.v1", "verifiers"),
])  # fmt: skip
def test_adapter_without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, prefix: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for module in (f"{prefix}_task", f"{prefix}_replay"):
        monkeypatch.delitem(sys.modules, f"peralta_zmq.environments.{module}", raising=False)
    message = rf"task {prefix}:NAME needs {library} \(.*\); pip install 'peralta_zmq\[{extra}\]'"
    with pytest.raises(ConfigError, match=message):
        resolve("task", f"{prefix}:x")


@pytest.mark.parametrize("kind", ["task", "loss", "advantage", "filter", "engine"])
def test_shipped_names_resolve(kind: Kind) -> None:
    for name in TABLES[kind]:
        resolve(kind, name)
    assert resolve("advantage", "group_mean")([1.0, 0.0, 0.0, 1.0], [3] * 4)[0] == 0.5


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("loss", "x", "unknown loss 'x'; choose one of bnpo, cispo, dapo, decoupled_ppo, dppo, "),
        ("advantage", "x", "unknown advantage 'x'; choose one of group_mean, group_zscore, "
                           "leave_one_out, length_weighted, max_rl, token_whitening, or the import "
                           "path of your own advantage"),
        ("loss", "inforce", "unknown loss 'inforce'; did you mean reinforce? Choose one of "),
        ("reward", "x", "unknown reward 'x'; choose one of answer_match, exact_match, "),
    ],
)  # fmt: skip
def test_unknown_name_is_refused_with_choices(kind: Kind, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        resolve(kind, name)


def test_dotted_name_resolves_to_a_task_module(lab: Path) -> None:
    (lab / "sudoku.py").write_text(GOOD_TASK)
    assert resolve("task", "my_lab.sudoku").reward.__module__ == "my_lab.sudoku"


@pytest.mark.parametrize("name", ["my_lab.losses.mine", "my_lab.losses:mine"])
def test_dotted_name_resolves_to_a_function(lab: Path, name: str) -> None:
    (lab / "losses.py").write_text("def mine(): ...")
    assert getattr(resolve("loss", name), "__name__", "") == "mine"


@pytest.mark.parametrize(
    ("kind", "name", "plugin", "reason"),
    [
        ("task", "no_such_lab.sudoku", "", "cannot be imported: No module named 'no_such_lab';"),
        ("loss", "my_lab.mine", "", "cannot be imported: module 'my_lab' has no attribute 'mine';"),
        ("loss", "my_lab..mine", "", r"cannot be imported: invalid format: 'my_lab\.:mine';"),
        ("task", "my_lab.plugin", "import no_lib", "cannot be imported: No module named 'no_lib';"),
        ("task", "my_lab.plugin", r"raise ImportError('a\nb')", "cannot be imported: a b;"),
        ("task", "my_lab.plugin", "def problems(:", r"cannot be imported: .*plugin\.py, line 1"),
        ("task", "my_lab.plugin", "def problems(split, seed): ...", r"has no reward\(\);"),
        ("loss", "my_lab.plugin.number", "number = 3", "is not callable;"),
    ],
)
def test_unusable_user_plugin_is_refused_on_one_line(
    lab: Path, kind: Kind, name: str, plugin: str, reason: str
) -> None:
    (lab / "plugin.py").write_text(plugin)
    with pytest.raises(ConfigError, match=f"^{kind} '{re.escape(name)}' {reason}") as caught:
        resolve(kind, name)
    assert "\n" not in str(caught.value)


def test_resolve_imports_only_the_named_plugin() -> None:
    code = """
import sys
from peralta_zmq.registry import resolve
resolve("advantage", "group_mean")
print("torch" in sys.modules, "peralta_zmq.engines.hf_engine" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False False\n"
