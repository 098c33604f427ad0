"""What every section of the config is, and the kinds of numbers and texts in them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field
from pydantic_config import BaseConfig  # pyright: ignore[reportMissingTypeStubs]

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Port: TypeAlias = Annotated[int, Field(ge=1, le=65533)]  # port + 1 and port + 2 are used too


class Section(BaseConfig):
    """Settings are read once and never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
