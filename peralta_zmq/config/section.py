"""What every section of the config is made of. Knows kinds of values; knows no setting."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias, cast, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_config import BaseConfig  # pyright: ignore[reportMissingTypeStubs]

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Port: TypeAlias = Annotated[int, Field(ge=1, le=65532)]  # the three after it are used too


def _split(given: object) -> object:
    """`1,2` on the command line is [1, 2] in a file."""
    if not isinstance(given, str):
        return given
    return [each.strip() for each in given.split(",")] if given.strip() else []


Names: TypeAlias = Annotated[tuple[Text, ...], BeforeValidator(_split)]
Numbers: TypeAlias = Annotated[tuple[float, ...], BeforeValidator(_split)]


class Section(BaseConfig):
    """Settings are read once and never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def rows_of(field: FieldInfo) -> type[Section] | None:
    """The kind of the tables in an array such as [[env]]; None for an ordinary setting."""
    if get_origin(field.annotation) is not tuple:
        return None
    kind = get_args(field.annotation)[0]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def default_text(field: FieldInfo) -> str:
    """A default as it is written on the command line."""
    default = cast(object, field.default)
    if isinstance(default, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", default)))
    return str(default)
