"""The layers table of the architecture, kept by reading the imports of every module."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "peralta_zmq"
TYPES = {"rollout", "errors", "atomic_files", "failpoints"}
LEAVES = {"config", "registry", "wire", "weights", "models", "learning", "environments",
          "observe"}  # fmt: skip
BUILD = {"build"}
LOOPS = {"generator", "trainer"}
BELOW = TYPES | LEAVES | {"engines"}
MAY_IMPORT = {
    **dict.fromkeys(TYPES, TYPES),
    **dict.fromkeys(LEAVES, TYPES),
    "engines": TYPES | {"models"},
    **dict.fromkeys(BUILD, BELOW | BUILD),
    **dict.fromkeys(LOOPS, BELOW | BUILD),
    "operate": TYPES | {"config", "observe", "wire"},
}
# A module that may import more than its layer, and why.
EXCEPTIONS = {
    "environments.verifier_service": BUILD | {"config"},  # a program of its own: a third loop
}
LAZILY = {"operate": LOOPS | BUILD | {"wire", "models", "weights"}}  # each when a command needs it
LIBRARIES = {  # which modules may import a library; all others go through these
    "zmq": {"wire"},
    "msgpack": {"wire"},
    "isal": {"wire", "trainer.journal", "weights"},
    "watchdog": {"weights"},
    "safetensors": {"weights", "trainer.checkpoint", "models"},  # models: its error only
    "peft": {"models.lora"},
    "bitsandbytes": {"learning.optimizer"},
    "transformers": {"models", "engines"},
    "zstandard": {"weights"},
    "obstore": {"weights"},
    "huggingface_hub": {"models"},
    "pydantic": {"config"},
    "pydantic_config": {"config"},
    "rich": {"observe", "operate"},
    "matplotlib": {"observe"},
}
WITHOUT_TORCH = {*TYPES, "config", "registry", "wire", "environments", "observe",
                 "operate"}  # fmt: skip


class Import(NamedTuple):
    """One imported module; lazy when inside a function."""

    name: str
    lazy: bool


parsed = functools.cache(ast.parse)  # by all who look at a module


def imports_of(source: str) -> Iterator[Import]:
    """Every import, also those for the type checker only."""
    todo: list[tuple[ast.AST, bool]] = [(parsed(source), False)]
    while todo:
        node, lazy = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            lazy = True
        if isinstance(node, ast.Import):
            yield from (Import(each.name, lazy) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            within = node.module == PACKAGE
            names = [f"{node.module}.{each.name}" for each in node.names] if within else []
            yield from (Import(name, lazy) for name in names or [str(node.module)])
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo.extend((child, lazy) for child in ast.iter_child_nodes(node))


def module_of(file: Path) -> str:
    """peralta_zmq/weights/watch.py -> stores.watch; a folder's __init__ is the folder."""
    return ".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(
        ".__init__"
    )


MODULES = {
    module_of(file): file.read_text("utf-8") for file in sorted((ROOT / PACKAGE).rglob("*.py"))
}
PROGRAMS = [each for each in sorted((ROOT / "bin").glob("*")) if each.is_file() and not each.suffix]
every_module = pytest.mark.parametrize("module", list(MODULES))


def is_in(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def room(module: str) -> str:
    return module.partition(".")[0]


def forbidden(module: str, imported: Import) -> bool:
    package, _, inside = imported.name.partition(".")
    if package != PACKAGE:
        return is_in(package, set(LIBRARIES)) and not is_in(module, LIBRARIES[package])
    own = room(module)
    allowed = MAY_IMPORT.get(own, set()) | {own}
    lazily = LAZILY.get(own, set[str]()) if imported.lazy else set[str]()
    return room(inside) not in allowed | lazily | EXCEPTIONS.get(module, set[str]())


@every_module
def test_module_imports_only_what_its_layer_may(module: str) -> None:
    assert [each.name for each in imports_of(MODULES[module]) if forbidden(module, each)] == []


@every_module
def test_module_says_what_it_does(module: str) -> None:
    assert ast.get_docstring(parsed(MODULES[module])), f"{module} has no docstring"


@pytest.mark.parametrize("module", [each for each in MODULES if is_in(each, WITHOUT_TORCH)])
def test_module_does_without_torch(module: str) -> None:
    assert "torch" not in {room(each.name) for each in imports_of(MODULES[module])}


@pytest.mark.parametrize("module", sorted(TYPES))
def test_types_need_numpy_at_most(module: str) -> None:
    known = sys.stdlib_module_names | {"numpy", PACKAGE}
    assert {room(each.name) for each in imports_of(MODULES[module])} <= known


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.name)
def test_program_is_at_most_20_lines(program: Path) -> None:
    assert len(program.read_text("utf-8").splitlines()) <= 20


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.name)
def test_program_parses_its_arguments_before_it_imports_a_library(program: Path) -> None:
    eager = {each.name for each in imports_of(program.read_text("utf-8")) if not each.lazy}
    assert not {room(name) for name in eager} & {"torch", "zmq", "transformers"}
    assert not eager & {f"{PACKAGE}.{loop}" for loop in LOOPS | {"models", "wire"}}
