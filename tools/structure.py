"""Figures of the source tree's structure: `make structure`.

`python -m tools.structure FOLDER` prints the figures of another checkout.

Prints lines and code lines of each package, top-level entries, very short and very long files,
the files that a rollout crosses, large classes, file names that occur twice, numeric constants
and `# fmt: skip`. Code lines exclude blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "peralta_zmq"
SHORT, LONG = 60, 400  # lines of a file
MANY = 15  # methods or attributes of a class

# From sampling to loss, in order: the files that change or decide about a rollout. The reading list
# of peralta_zmq/__init__.py has some of them in parentheses. A folder counts as one file, because
# its text in the list is all that a reader needs to know of it.
ROLLOUT_PATH = (
    "rollout.py",
    "generator/loop.py",
    "engines",
    "environments",
    "generator/trainer_connection.py",
    "wire/messages.py",
    "wire/sockets.py",
    "trainer/collector.py",
    "learning/admission.py",
    "trainer/loop.py",
    "learning/learner.py",
    "learning/advantages.py",
    "learning/packing.py",
    "models/scoring.py",
    "learning/losses.py",
)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


class Source(NamedTuple):
    """One Python file."""

    path: Path  # relative to the package
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        """Physical lines."""
        return len(self.text.splitlines())

    @property
    def num_code_lines(self) -> int:
        """Lines without blanks, comments and docstrings."""
        docstrings: set[int] = set()
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.Expr) and _is_text(statement.value):
                    docstrings |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in NO_CODE:
                lines |= set(range(token.start[0], token.end[0] + 1))
        return len(lines - docstrings)


def main() -> None:
    """Print the figures of this checkout, or of the one that the first argument names."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    sources = read_package(root / PACKAGE)
    _print_packages(sources)
    _print_files(sources, root / PACKAGE)
    _print_classes(sources)
    constants = [name for source in sources for name in numeric_constants(source.tree)]
    skips = sum(source.text.count("# fmt: skip") for source in sources)
    print(f"numeric module constants: {len(constants)}\n# fmt: skip: {skips}")


def read_package(folder: Path) -> list[Source]:
    """Return all Python files below `folder`."""
    return [
        Source(file.relative_to(folder), text, ast.parse(text))
        for file in sorted(folder.rglob("*.py"))
        for text in [file.read_text("utf-8")]
    ]


def large_classes(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yield name, methods and attributes of each class with more than `MANY` of either.

    Attributes are those assigned on `self`; fields of dataclasses and settings are not counted.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = sum(isinstance(member, ast.FunctionDef) for member in node.body)
        attributes = {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
        if max(methods, len(attributes)) > MANY:
            yield node.name, methods, len(attributes)


def numeric_constants(tree: ast.Module) -> Iterator[str]:
    """Yield the names of module constants whose values are numbers."""
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id.isupper() and _is_number(value):
                    yield name.id


def _print_packages(sources: list[Source]) -> None:
    lines: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        lines[source.path.parts[0]].append(source)
    print(f"{'package':<20}{'files':>6}{'lines':>8}{'code':>8}")
    for name, group in [*sorted(lines.items()), ("total", sources)]:
        physical = sum(source.num_lines for source in group)
        code = sum(source.num_code_lines for source in group)
        print(f"{name:<20}{len(group):>6}{physical:>8}{code:>8}")


def _print_files(sources: list[Source], folder: Path) -> None:
    entries = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    print(f"top-level entries: {len(entries)} ({', '.join(entries)})")
    inits = ("__init__.py", "__main__.py")
    short = [str(s.path) for s in sources if s.num_lines < SHORT and s.path.name not in inits]
    print(f"files under {SHORT} lines: {len(short)} ({', '.join(short)})")
    long = [f"{source.path} {source.num_lines}" for source in sources if source.num_lines > LONG]
    print(f"files over {LONG} lines: {len(long)} ({', '.join(long)})")
    by_name: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        if source.path.name not in inits:
            by_name[source.path.name].append(str(source.path))
    twice = [" = ".join(paths) for paths in by_name.values() if len(paths) > 1]
    print(f"file names that occur twice: {len(twice)} ({', '.join(twice)})")
    crossed = [source for source in sources if str(source.path) in ROLLOUT_PATH]
    boxes = [name for name in ROLLOUT_PATH if (folder / name).is_dir()]
    print(
        f"files that a rollout crosses: {len(crossed) + len(boxes)} with "
        f"{sum(source.num_lines for source in crossed)} lines, without those of {boxes}"
    )


def _print_classes(sources: list[Source]) -> None:
    classes = [
        f"{source.path}:{name} ({methods} methods, {attributes} attributes)"
        for source in sources
        for name, methods, attributes in large_classes(source.tree)
    ]
    print(f"classes with more than {MANY} methods or attributes: {len(classes)}")
    for line in classes:
        print(f"  {line}")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_number(node: ast.expr) -> bool:
    """Return whether the expression consists of numbers and operators only."""
    parts = list(ast.walk(node))
    numbers = [part for part in parts if isinstance(part, ast.Constant)]
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return (
        bool(numbers)
        and all(isinstance(part, allowed) for part in parts)
        and all(isinstance(n.value, (int, float)) and n.value is not True for n in numbers)
    )


if __name__ == "__main__":
    main()
