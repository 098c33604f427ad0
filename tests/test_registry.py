"""Names of plug-ins."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import TABLES, Kind, resolve

GOOD_TASK = """
def problems(split, seed, **options): ...
def reward(problem, completion_text): return 1.0
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package, importable as `my_lab`."""
    folder = tmp_path / "my_lab"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.parametrize("kind", ["task", "loss", "advantage", "filter"])
def test_shipped_names_resolve(kind: Kind) -> None:
    for name in TABLES[kind]:
        resolve(kind, name)


def test_native_engine_resolves_to_open_engine() -> None:
    assert getattr(resolve("engine", "native"), "__name__", "") == "NativeEngine"


def test_hf_engine_resolves_to_its_class() -> None:
    assert getattr(resolve("engine", "hf"), "__name__", "") == "HfEngine"


def test_resolved_advantage_is_callable() -> None:
    advantage = resolve("advantage", "group_mean")
    assert advantage([1.0, 0.0, 0.0, 1.0], [3, 3, 3, 3]) == [0.5, -0.5, -0.5, 0.5]


def test_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("loss", "x")
    menu = "decoupled_ppo, dppo, grpo, grpo_kl, gspo, importance, reinforce"
    expected = f"unknown loss 'x'; choose one of {menu}, or the dotted name of your own loss"
    assert str(caught.value) == expected


def test_misspelt_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown loss 'inforce'; did you mean reinforce\? "):
        resolve("loss", "inforce")


def test_dotted_name_resolves_to_a_task_module(lab: Path) -> None:
    (lab / "sudoku.py").write_text(GOOD_TASK)
    assert resolve("task", "my_lab.sudoku").reward.__module__ == "my_lab.sudoku"


@pytest.mark.parametrize("name", ["my_lab.losses.mine", "my_lab.losses:mine"])
def test_dotted_name_resolves_to_a_function(lab: Path, name: str) -> None:
    (lab / "losses.py").write_text("def mine(): ...")
    assert getattr(resolve("loss", name), "__name__", "") == "mine"


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("task", "no_such_lab.sudoku", "No module named 'no_such_lab'"),
        ("loss", "my_lab.mine", "module 'my_lab' has no attribute 'mine'"),
        ("loss", "my_lab..mine", "invalid format: 'my_lab.:mine'"),
    ],
)
def test_dotted_name_that_cannot_be_imported_is_refused(
    lab: Path, kind: Kind, name: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(kind, name)
    assert str(caught.value).startswith(f"{kind} '{name}' cannot be imported: {reason}; ")


def test_missing_library_of_a_user_task_is_named(lab: Path) -> None:
    (lab / "needy.py").write_text("import no_such_library")
    with pytest.raises(ConfigError, match="No module named 'no_such_library'"):
        resolve("task", "my_lab.needy")


def test_syntax_error_in_a_user_task_is_one_line(lab: Path) -> None:
    (lab / "broken.py").write_text("def problems(:")
    with pytest.raises(ConfigError, match=r"my_lab\.broken.*broken\.py, line 1") as caught:
        resolve("task", "my_lab.broken")
    assert "\n" not in str(caught.value)


def test_task_without_reward_is_refused(lab: Path) -> None:
    (lab / "half.py").write_text("def problems(split, seed): ...")
    with pytest.raises(ConfigError, match=r"task 'my_lab.half' has no reward\(\)"):
        resolve("task", "my_lab.half")


def test_loss_that_is_not_callable_is_refused(lab: Path) -> None:
    (lab / "__init__.py").write_text("number = 3")
    with pytest.raises(ConfigError, match=r"loss 'my_lab\.number' is not callable"):
        resolve("loss", "my_lab.number")


def test_resolve_imports_only_the_named_plugin() -> None:
    code = """
import sys
from peralta_zmq.registry import resolve
resolve("advantage", "group_mean")
print("torch" in sys.modules, "peralta_zmq.engines.hf" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False False\n"


def test_unknown_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown reward 'x'; give the dotted name of your own"):
        resolve("reward", "x")
