"""Sizes of the program: lines, settings, constants and words, and a check against a budget.

`python -m tools.sizes [--check .ci/budget.toml] [FOLDER]` counts every file of a checkout, by
default of this one, and prints a table. With a budget, it prints one line for each size that
exceeds it, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
PACKAGE = "peralta_zmq"
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def sizes(folder: Path) -> dict[str, float]:
    """Return the sizes of a checkout by name; lines and words are of all files of a kind."""
    modules = [file.read_text("utf-8") for file in sorted((folder / PACKAGE).rglob("*.py"))]
    trees = [ast.parse(text) for text in modules]
    num_lines = sum(text.count("\n") for text in modules)
    num_words = sum(
        len(str(docstring.value).split()) for tree in trees for docstring in docstrings(tree)
    )
    num_parallel = sum(is_parallel(node) for tree in trees for node in ast.walk(tree))
    settings = (folder / "docs" / "config.md").read_text("utf-8")
    return {
        "package_lines": num_lines,
        "package_code_lines": sum(map(num_code_lines, modules)),
        "settings": len(re.findall(r"^\| `\w+`", settings, re.MULTILINE)),
        "numeric_constants": sum(num_numeric_constants(tree) for tree in trees),
        "docs_words": sum(
            len(page.read_text("utf-8").split()) for page in folder.glob("docs/**/*.md")
        ),
        "docstring_words_per_100_lines": round(100 * num_words / num_lines, 1),
        "tests_lines": lines_of(folder / "tests"),
        "benchmarks_and_tools_lines": lines_of(folder / "benchmarks") + lines_of(folder / "tools"),
        "parallel_assignments_per_1000_lines": round(1000 * num_parallel / num_lines, 1),
    }


def lines_of(folder: Path) -> int:
    return sum(file.read_text("utf-8").count("\n") for file in folder.rglob("*.py"))


def num_code_lines(text: str) -> int:
    """Number of lines that have code: not only a comment, a docstring or nothing."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings(ast.parse(text)):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()) as docstring), *_]:
                    yield docstring
                case _:
                    pass


def num_numeric_constants(module: ast.Module) -> int:
    """Number of names in capitals that a module sets to numbers or expressions with numbers.

    Each name of `A, B = 1, 2` counts; a tuple of numbers counts once; True and False do not count.
    """
    return sum(
        isinstance(name, ast.Name) and name.id.isupper() and is_numeric(value)
        for statement in module.body
        for name, value in assignments(statement)
    )


def assignments(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment with their values; those of `a, b = x, y` one by one."""
    match statement:
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return [(target, value)]
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            return list(zip(targets, values, strict=False))  # a starred target takes several
        case ast.Assign(targets=targets, value=value):
            return [(target, value) for target in targets]
        case _:
            return []


def is_numeric(node: ast.expr) -> bool:
    """True for numbers, expressions of numbers, and tuples of them."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return is_numeric(operand)
        case ast.BinOp(left=left, right=right):
            return is_numeric(left) or is_numeric(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(map(is_numeric, elements))
        case _:
            return False


def is_parallel(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            return True
        case _:
            return False


def read_budget(file: Path) -> dict[str, float]:
    return tomllib.loads(file.read_text("utf-8"))


def over_budget(found: dict[str, float], budget: dict[str, float]) -> list[str]:
    """Return one line for each size that is above its budget."""
    return [
        f"{name} is {found[name]:.10g}, the budget {limit:.10g}"
        for name, limit in budget.items()
        if found[name] > limit
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=REPO)
    parser.add_argument("--check", type=Path, metavar="BUDGET", help="TOML file of largest sizes")
    given = parser.parse_args(arguments)
    found = sizes(given.folder)
    for name, size in found.items():
        print(f"{name:36} {size:>9,.10g}")
    if given.check is None:
        return 0
    exceeded = over_budget(found, read_budget(given.check))
    for line in exceeded:
        print(line, file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
