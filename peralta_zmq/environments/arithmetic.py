"""Safe evaluation of untrusted arithmetic to an exact rational number.

Accepts numbers, + - * / // % ** and parentheses, with Python's precedence. Bounds on length, depth
and magnitude keep the run time below 10 ms. `eval` is never called.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an expression."""

    length: int = 256  # characters, without the whitespace around it
    nodes: int = 128  # numbers and operations
    depth: int = 40  # parentheses, and operations, inside each other
    magnitude: int = 10**15  # every intermediate numerator and denominator
    exponent: int = 64


LIMITS = Limits()
CHARACTERS = frozenset("0123456789.+-*/%() \n\t")

BINARY_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: lambda left, right: left % right,
    ast.Pow: lambda left, right: _power(left, right),
}


# Cached: all completions of a problem have the same target expression, and many are equal.
@functools.lru_cache(maxsize=4096)
def evaluate(text: str) -> Fraction:
    """The exact value of an arithmetic expression; ignores surrounding whitespace.

    Raises ValueError for other characters or syntax, a division by zero, a fractional exponent or
    an exceeded bound.
    """
    source = text.strip()
    _check_text(source)
    try:
        tree = ast.parse(source, mode="eval").body
        if sum(isinstance(node, ast.expr) for node in ast.walk(tree)) > LIMITS.nodes:
            raise ValueError(f"more than {LIMITS.nodes} numbers and operations")
        return _value(tree, source.split("\n"), depth=1)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError):  # raised by the parser
        raise ValueError("not an expression") from None


def _check_text(source: str) -> None:
    """Raise ValueError for text that is slow to parse or is not arithmetic."""
    if not source:
        raise ValueError("an empty text")
    if len(source) > LIMITS.length:
        raise ValueError(f"more than {LIMITS.length} characters")
    if foreign := sorted(set(source) - CHARACTERS):
        raise ValueError(f"{foreign[0]!a} is not arithmetic")
    if max(accumulate((char == "(") - (char == ")") for char in source)) > LIMITS.depth:
        raise ValueError(f"parentheses deeper than {LIMITS.depth}")


def _value(node: ast.expr, lines: list[str], *, depth: int) -> Fraction:
    """The value of a node, checked against the bounds; `lines` is the source text."""
    if depth > LIMITS.depth:
        raise ValueError(f"operations deeper than {LIMITS.depth}")
    match node:
        case ast.Constant(value=int() | float()):  # from the source: 0.1 is one tenth
            value = Fraction(lines[node.lineno - 1][node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.USub()):
            value = -_value(node.operand, lines, depth=depth + 1)
        case ast.UnaryOp(op=ast.UAdd()):
            value = _value(node.operand, lines, depth=depth + 1)
        case ast.BinOp():
            left = _value(node.left, lines, depth=depth + 1)
            right = _value(node.right, lines, depth=depth + 1)
            value = BINARY_OPERATORS[type(node.op)](left, right)
        case _:
            raise ValueError("not arithmetic")
    if max(abs(value.numerator), value.denominator) > LIMITS.magnitude:
        raise ValueError(f"a number beyond {LIMITS.magnitude:.0e}")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent, whose size the caller checks."""
    if exponent.denominator != 1:
        raise ValueError("an exponent that is not a whole number")
    if abs(exponent) > LIMITS.exponent:
        raise ValueError(f"an exponent beyond {LIMITS.exponent}")
    return Fraction(base ** int(exponent))
