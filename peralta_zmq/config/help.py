"""The text of --help: every knob, its default and its meaning.

pydantic_config has one too, but it reads pydantic's own source once per section: 0.8 s.
"""

from __future__ import annotations

import shutil
import textwrap
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from peralta_zmq.config.environments import EnvSection
from peralta_zmq.config.section import default_text, rows_of
from peralta_zmq.config.settings import sections

USAGE = """\
usage: {program} [@ FILE.toml ...] [--section.name VALUE ...]

Settings come from the defaults shown here, then from TOML files in their order, then from
options:  {program} @ configs/lan.toml --train.learning-rate 1e-5
The same file serves the trainer and every generator."""
FLAG_WIDTH = 43


def help_text(program: str) -> str:
    """Usage and all sections of the config, as wide as the terminal."""
    width = max(80, shutil.get_terminal_size().columns)
    parts = [USAGE.format(program=program)]
    for name, section in sections().items():
        knobs = [_knob(f"--{name}.{leaf}".replace("_", "-"), field, width)
                 for leaf, field in section.model_fields.items() if not rows_of(field)]  # fmt: skip
        parts.append("\n".join([f"[{name}] {section.__doc__}", *knobs]))
    rows = [_knob(leaf, field, width) for leaf, field in EnvSection.model_fields.items()]
    parts.append("\n".join([f"[[env]], [[eval.env]] {EnvSection.__doc__} In files only.", *rows]))
    return "\n\n".join(parts) + "\n"


def _knob(flag: str, field: FieldInfo, width: int) -> str:
    flag = f"  {flag} {default_text(field)}"
    meaning = textwrap.wrap(f"{field.description}{_choices(field)}", width - FLAG_WIDTH)
    indent = f"\n{'':<{FLAG_WIDTH}}"
    first = f"{flag:<{FLAG_WIDTH}}" if len(flag) < FLAG_WIDTH else flag + indent
    return first + indent.join(meaning)


def _choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return f" ({', '.join(map(str, get_args(field.annotation)))})"
