"""Short names, names of one's own, and the line that answers a wrong one."""

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
    """A package of a user's own, importable as `my_lab`."""
    folder = tmp_path / "my_lab"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.parametrize("kind", ["task", "loss", "advantage", "filter"])
def test_every_shipped_name_resolves(kind: Kind) -> None:
    for name in TABLES[kind]:
        resolve(kind, name)


def test_the_native_engine_resolves_to_what_opens_it() -> None:
    assert getattr(resolve("engine", "native"), "__name__", "") == "NativeEngine"


def test_the_hf_engine_resolves_to_its_class() -> None:
    assert getattr(resolve("engine", "hf"), "__name__", "") == "HfEngine"


def test_a_resolved_advantage_can_be_called() -> None:
    advantage = resolve("advantage", "group_mean")
    assert advantage([1.0, 0.0, 0.0, 1.0], [3, 3, 3, 3]) == [0.5, -0.5, -0.5, 0.5]


def test_an_unknown_name_is_answered_with_the_menu() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("loss", "x")
    menu = "decoupled_ppo, dppo, grpo, grpo_kl, gspo, importance, reinforce"
    expected = f"unknown loss 'x'; choose one of {menu}, or the dotted name of your own loss"
    assert str(caught.value) == expected


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown loss 'inforce'; did you mean reinforce\? "):
        resolve("loss", "inforce")


def test_a_dotted_name_is_a_task_module_of_one_s_own(lab: Path) -> None:
    (lab / "sudoku.py").write_text(GOOD_TASK)
    assert resolve("task", "my_lab.sudoku").reward.__module__ == "my_lab.sudoku"


@pytest.mark.parametrize("name", ["my_lab.losses.mine", "my_lab.losses:mine"])
def test_a_dotted_name_is_a_function_of_one_s_own(lab: Path, name: str) -> None:
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
def test_a_dotted_name_that_leads_nowhere_is_a_config_error(
    lab: Path, kind: Kind, name: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(kind, name)
    assert str(caught.value).startswith(f"{kind} '{name}' cannot be imported: {reason}; ")


def test_the_library_that_a_task_of_one_s_own_misses_is_named(lab: Path) -> None:
    (lab / "needy.py").write_text("import no_such_library")
    with pytest.raises(ConfigError, match="No module named 'no_such_library'"):
        resolve("task", "my_lab.needy")


def test_a_syntax_error_in_a_task_of_one_s_own_is_named_on_one_line(lab: Path) -> None:
    (lab / "broken.py").write_text("def problems(:")
    with pytest.raises(ConfigError, match=r"my_lab\.broken.*broken\.py, line 1") as caught:
        resolve("task", "my_lab.broken")
    assert "\n" not in str(caught.value)


def test_a_task_without_a_reward_is_refused(lab: Path) -> None:
    (lab / "half.py").write_text("def problems(split, seed): ...")
    with pytest.raises(ConfigError, match=r"task 'my_lab.half' has no reward\(\)"):
        resolve("task", "my_lab.half")


def test_a_loss_that_is_not_callable_is_refused(lab: Path) -> None:
    (lab / "__init__.py").write_text("number = 3")
    with pytest.raises(ConfigError, match=r"loss 'my_lab\.number' is not callable"):
        resolve("loss", "my_lab.number")


def test_only_the_part_that_a_run_asks_for_is_imported() -> None:
    code = """
import sys
from peralta_zmq.registry import resolve
resolve("advantage", "group_mean")
print("torch" in sys.modules, "peralta_zmq.engines.hf" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False False\n"


def test_there_is_no_menu_of_rewards() -> None:
    with pytest.raises(ConfigError, match="unknown reward 'x'; give the dotted name of your own"):
        resolve("reward", "x")
