"""Write docs/config.md, a table of all settings, from the schema of the settings: `make docs`.

Each section of the settings is a pydantic model. A test compares the page with the schema.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from peralta_zmq.config.schema import section_models
from peralta_zmq.config.sections import Section, default_text, row_model_of
from peralta_zmq.config.training_sections import DataSection, EnvSection, RewardSettings

DOCUMENT = Path(__file__).parents[1] / "docs" / "config.md"
OPENING = """\
# Settings

All settings of a run, written by `make docs` from the program. The trainer and all generators read
the same TOML file: `bin/trainer @ configs/lan.toml`. On the command line, a setting is
`--section.name VALUE` with hyphens instead of underscores; it overrides the file:
`bin/trainer @ configs/lan.toml --train.learning-rate 1e-5`. `--no-eval.eval-base-model` sets
`eval.eval_base_model`, which is true or false, to false. The value `None` unsets a setting.
"""
INHERITED = {*DataSection.model_fields, *RewardSettings.model_fields}
NOTE = """ In files only. Further settings are those of
[data], and `reward`, `reward_weights` and `reward_kwargs` as in [task]."""
KINDS = {bool: "bool", int: "int", float: "float", str: "text", tuple: "list", dict: "table"}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def config_text() -> str:
    parts = [OPENING]
    for name, section in section_models().items():
        parts.append(_section(f"[{name}]", section))
    parts.append(_section("[[env]] and [[eval.env]]", EnvSection, note=NOTE, without=INHERITED))
    return "\n".join(parts)


def main() -> None:
    """Write the page to docs/config.md, or to the file that the first argument names."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCUMENT
    file.write_text(config_text(), "utf-8")


def _section(
    title: str, section: type[Section], *, note: str = "", without: Collection[str] = ()
) -> str:
    rows = [
        f"| `{name}` | {_code(default_text(field))} | {allowed(field)} | {_cell(field)} |"
        for name, field in section.model_fields.items()
        if not row_model_of(field) and name not in without
    ]
    head = ["| setting | default | may be | meaning |", "|---|---|---|---|"]
    return "\n".join(
        [f"## {title}\n", f"{cleandoc(section.__doc__ or '')}{note}\n", *head, *rows, ""]
    )


def allowed(field: FieldInfo) -> str:
    """Type and limits of a setting: 'int >=1', '`a` or `b`', 'text or None'."""
    words = list(dict.fromkeys(_words(field.annotation, field.metadata)))
    optional = "None" in words
    text = " ".join(word for word in words if word != "None")
    return f"{text} or None" if optional else text


def _words(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Literal:
        yield " or ".join(f"`{value}`" for value in get_args(annotation))
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _words(member, metadata)
    elif hasattr(annotation, "__metadata__"):  # Annotated
        yield from _words(get_args(annotation)[0], [*annotation.__metadata__, *metadata])
    elif annotation is type(None):
        yield "None"
    else:
        yield KINDS.get(origin or annotation, "table")
        yield from _bounds(metadata)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for constraint in metadata:  # a pydantic Field holds its constraints in a list of its own
        for part in [constraint, *cast("list[Any]", getattr(constraint, "metadata", None) or [])]:
            for name, sign in BOUNDS.items():
                if (bound := getattr(part, name, None)) is not None:
                    yield f"{sign}{bound:g}"


def _code(text: str) -> str:
    return f"`{text}`" if text else "(empty)"


def _cell(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
