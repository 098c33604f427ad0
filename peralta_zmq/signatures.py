"""The parameters that a user's function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class Signature:
    """The parameters of a function after its first `num_positional`."""

    def __init__(self, function: Callable[..., Any], num_positional: int = 0) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        named = [each for each in parameters[num_positional:] if each.kind is not each.VAR_KEYWORD]
        self.takes_all = len(named) < len(parameters[num_positional:])  # has **options
        self.names = [each.name for each in named]
        # Values bound by functools.partial are defaults, too.
        self.defaults = {
            each.name: each.default for each in named if each.default is not each.empty
        }
        self.required = [
            each.name
            for each in named
            if each.default is each.empty and each.kind is not each.VAR_POSITIONAL
        ]
        self._positional = {each.name for each in parameters[:num_positional]}

    def accepts(self, name: str) -> bool:
        return name in self.names or self.takes_all

    def accepted(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of `available` that the function takes as keywords."""
        return {
            name: value
            for name, value in available.items()
            if name not in self._positional and self.accepts(name)
        }


def call_error(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Why a function cannot be called with these arguments; empty if it can."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        return str(error)
    return ""
