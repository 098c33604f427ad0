"""Check the import layers of the package, including lazy and type-checking imports."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "peralta_zmq"
TYPES = {
    *("rollout", "errors", "atomic_files", "addresses"),
    *("compiler", "imports", "malloc", "named_losses", "signatures"),
}
LEAVES = {
    *("config", "registry", "wire", "weights"),
    *("models", "learning", "environments", "observe"),
}
LOOPS = {"generator", "trainer"}
BELOW_LOOPS = TYPES | LEAVES | {"http_server"} | {"engines", "memory", "build"}
MAY_IMPORT = {
    **dict.fromkeys(TYPES, TYPES),
    "http_server": TYPES,
    **dict.fromkeys(LEAVES, TYPES | {"http_server"}),
    "learning": TYPES | {"config"},  # [loss] declares the options of the losses
    "engines": TYPES | {"models", "registry"},  # the registry defines the protocol Engine
    "memory": TYPES | {"config", "learning", "models", "weights", "engines"},  # counts tensors
    "build": BELOW_LOOPS,
    "serving": BELOW_LOOPS,
    **dict.fromkeys(LOOPS, BELOW_LOOPS | {"serving"}),
    "operate": TYPES | {"config", "observe", "wire"},
    "api": TYPES | {"config", "observe"},  # the front door
    "policy": BELOW_LOOPS | {"trainer"},
}
LAZILY = {  # a command imports what it needs, for a fast --help
    "operate": BELOW_LOOPS | LOOPS,
    "api": BELOW_LOOPS | LOOPS | {"policy"},
    "__init__": {"api"},
}
EXCEPTIONS = {
    "environments.verifier_service": {"build", "config"},  # a program with its own loop
}
LIBRARIES = {  # the only modules that may import a library
    "zmq": {"wire"},
    "msgpack": {"wire"},
    "isal": {"wire", "weights", "trainer.journal"},
    "watchdog": {"weights"},
    "zstandard": {"weights"},
    "obstore": {"weights"},
    "mlx": {"engines.mlx"},
    "mlx_lm": {"engines.mlx"},
    "vllm": {"engines.vllm"},
    "safetensors": {"weights", "trainer.checkpoint", "models"},
    "transformers": {"models", "engines"},
    "huggingface_hub": {"models"},
    "peft": {"models.lora"},
    "bitsandbytes": {"learning.optimizer"},
    "math_verify": {"environments.math_answers"},
    "pydantic": {
        *("config", "serving.protocol"),
        *("environments.verifier_client", "environments.verifier_service"),
    },
    "pydantic_config": {"config"},
    "rich": {"observe"},
    "starlette": {
        *("http_server", "observe.dashboard", "serving", "weights.server"),
        "environments.verifier_service",
    },
    "uvicorn": {"http_server"},
}
WITHOUT_TORCH = TYPES | {"config", "registry", "wire", "environments", "observe", "operate"}


class Import(NamedTuple):
    """One imported module; lazy if inside a function or for type checking only."""

    name: str
    lazy: bool
    in_function: bool


def module_name(file: Path) -> str:
    """peralta_zmq/weights/store.py -> weights.store; the __init__ of a folder -> the folder."""
    name = ".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


TREES = {
    module_name(file): ast.parse(file.read_text("utf-8"))
    for file in sorted((ROOT / PACKAGE).rglob("*.py"))
}
PROGRAMS = [file for file in sorted((ROOT / "bin").glob("*")) if file.is_file() and not file.suffix]


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every import; `from package import module` is the module."""
    todo = [(tree, False, False)]
    while todo:
        node, lazy, in_function = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            lazy = True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            lazy = in_function = True
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, lazy, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name.removeprefix(f"{PACKAGE}.") in TREES
                yield Import(name if is_module else str(node.module), lazy, in_function)
        todo.extend((child, lazy, in_function) for child in ast.iter_child_nodes(node))


IMPORTS = {module: list(imports_of(tree)) for module, tree in TREES.items()}


def top(name: str) -> str:
    return name.partition(".")[0]


def is_in(module: str, packages: set[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def is_forbidden(module: str, imported: Import) -> bool:
    library, _, inside = imported.name.partition(".")
    if library != PACKAGE:
        return library in LIBRARIES and not is_in(module, LIBRARIES[library])
    allowed = {top(module)} | MAY_IMPORT.get(top(module), set()) | EXCEPTIONS.get(module, set())
    if imported.lazy:
        allowed |= LAZILY.get(top(module), set())
    return top(inside) not in allowed


def test_top_level_has_the_documented_entries() -> None:
    entries = {path.stem for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"}
    packages = {"__init__", "api", "build", "engines", "http_server", "memory", "operate", "policy",
                "serving"}  # fmt: skip
    assert entries == packages | TYPES | LEAVES | LOOPS


def test_modules_import_only_lower_layers() -> None:
    forbidden = [
        f"{module}: {imported.name}"
        for module, imports in IMPORTS.items()
        for imported in imports
        if is_forbidden(module, imported)
    ]
    assert forbidden == []


def test_modules_have_no_import_cycle() -> None:
    """Includes type checking; a function may import an implementation that it chooses."""
    graph = {
        module: {
            imported.name.removeprefix(f"{PACKAGE}.")
            for imported in imports
            if imported.name.startswith(f"{PACKAGE}.") and not imported.in_function
        }
        for module, imports in IMPORTS.items()
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_modules_have_a_docstring() -> None:
    assert [module for module, tree in TREES.items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_package_does_not_import_torch(package: str) -> None:
    modules = [module for module in IMPORTS if is_in(module, {package})]
    assert modules
    for module in modules:
        assert "torch" not in {top(imported.name) for imported in IMPORTS[module]}, module


@pytest.mark.parametrize("module", sorted(TYPES))
def test_layer_0_imports_only_numpy(module: str) -> None:
    allowed = sys.stdlib_module_names | {"numpy", PACKAGE}
    assert {top(imported.name) for imported in IMPORTS[module]} <= allowed


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.name)
def test_program_parses_arguments_before_it_imports_a_library(program: Path) -> None:
    text = program.read_text("utf-8")
    assert len(text.splitlines()) <= 20
    eager = {imported.name for imported in imports_of(ast.parse(text)) if not imported.lazy}
    assert not {top(name) for name in eager} & {"torch", "zmq", "transformers"}
    assert not eager & {f"{PACKAGE}.{package}" for package in LOOPS | {"models", "wire"}}
