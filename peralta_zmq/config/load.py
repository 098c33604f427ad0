"""Load settings from the command line and TOML files into `Config`; print --help.

Each error is one line with the remedy. The parsing itself is done by pydantic_config.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_config import ConfigFileError, cli  # pyright: ignore[reportMissingTypeStubs]
from pydantic_core import ErrorDetails

from peralta_zmq import named_losses
from peralta_zmq.config.foreign_names import (
    removed_hint,
    shorten,
    unknown_section,
    unknown_setting,
)
from peralta_zmq.config.schema import Config, known_fields, section_models
from peralta_zmq.config.sections import Section, default_text, row_model_of
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.errors import ConfigError, did_you_mean, program_name

FILE_SIGN = "@"  # precedes the name of a config file on the command line
USAGE = """\
usage: {usage} [@ FILE.toml ...] [--section.name VALUE ...]

Settings come from their defaults, then from TOML files in their order, then from options:
  {example} @ configs/demo.toml --train.learning-rate 1e-5
The same file configures the trainer and every generator. The sections are:
"""
MORE_HELP = {
    "{program} --help train": "all settings of a section, here of [train]",
    "{program} --help tokens": "the settings with a word in their name or description",
    "{program} --help loss": "the losses and their formulas",
    "{program} --version": "the version of the package",
}
BOOLS = ("true", "True", "1", "false", "False", "0")  # words that may follow a switch as its value


def load_config(program: str, arguments: Sequence[str], *, commands: Sequence[str] = ()) -> Config:
    """Return the settings for the `arguments` of a command line.

    `program` is the command for the help and the errors, and `commands` are its subcommands.
    `--help [TOPIC]` prints the help and exits. Raises ConfigError.
    """
    words = _split_arguments(arguments)
    for word, following in pairwise([*words, "--"]):
        if word in ("-h", "--help"):
            topic = "" if following.startswith(("-", FILE_SIGN)) else following
            sys.stdout.write(help_text(program, commands, topic=topic))
            raise SystemExit(0)
    try:
        check_files(words)
        _check_words(words, program)
        return cli(Config, args=words)
    except (ConfigError, ConfigFileError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(" ".join(reason_of(error, program).split())) from None


def files_given() -> str:
    """Return the config files of this process, such as ' @ configs/lan.toml'."""
    words = _split_arguments(sys.argv[1:])
    return "".join(f" @ {name}" for sign, name in pairwise(words) if sign == FILE_SIGN)


def check_files(words: Sequence[str]) -> None:
    """Raise ConfigError for a config file that is missing or is not named *.toml."""
    for sign, name in pairwise(words):
        path = Path(name)
        if sign != FILE_SIGN:
            continue
        if path.suffix != ".toml":
            raise ConfigError(f"config file {name} is not a TOML file; name one that ends in .toml")
        if not path.is_file():
            names = sorted(file.name for file in path.parent.glob("*.toml"))
            hint = did_you_mean(path.name, names, str(path.parent / "{}"))
            listed = f"{path.parent}/ has {', '.join(names) or 'no .toml file'}"
            raise ConfigError(f"config file {name} does not exist; {hint or listed}")


def reason_of(error: Exception, program: str, root: type[Section] = Config) -> str:
    """Explain an error of the command line or of a file; `root` is `Config` or `Hosts`."""
    if isinstance(error.__cause__, ValidationError):
        problems = error.__cause__.errors(include_url=False)
        for problem in problems:
            # The array [[env]] is valid. A table [env] is explained as an unknown section, because
            # other programs call the section [task] "env".
            if problem["type"] == "extra_forbidden" or problem["loc"] == ("env",):
                return _explain_unknown(root, problem["loc"], problem["input"])
        return "; ".join(map(_explain_wrong_value, problems))
    if isinstance(error, ConfigFileError):
        return f"{error}; {program} --help lists all settings"
    if isinstance(error, OSError):
        return f"config file {error.filename}: {error.strerror}; make it readable"
    if isinstance(error, UnicodeDecodeError):
        return f"a config file is not UTF-8 text ({error}); save it as UTF-8"
    return str(error)


def _explain_unknown(root: type[Section], path: Sequence[str | int], value: object) -> str:
    """Explain an unknown setting; `path` has its tables, row numbers, and last its name."""
    *tables, leaf = (key for key in path if isinstance(key, str))
    if root is Config and not tables:
        return unknown_section(leaf, value, known_fields())
    if root is Config and len(path) == 2:
        return unknown_setting(tables[0], leaf, value, known_fields())
    model = root
    for table in tables:
        model = _model_of(model.model_fields.get(table)) or model
    has_row_number = len(path) > len(tables) + 1
    table = f"[[{'.'.join(tables)}]]" if has_row_number else f"[{'.'.join(tables)}]"
    choices = f"the settings there are {', '.join(model.model_fields)}"
    hint = removed_hint(tables[-1], leaf) or did_you_mean(leaf, model.model_fields) or choices
    return f"unknown setting {leaf} in {table}; {hint}"


def _model_of(field: FieldInfo | None) -> type[Section] | None:
    """Return the model of a table, of an array's rows or of a dict's values."""
    annotation = field.annotation if field else None
    kinds = (annotation, *get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def _explain_wrong_value(problem: ErrorDetails) -> str:
    """Explain an invalid value of a setting, or a section that is used as a setting."""
    name = ".".join(map(str, problem["loc"]))
    value = shorten(problem["input"])
    if name in section_models():
        leaves = ", ".join(known_fields()[name])
        return f"'{name}' is a section, not a setting ({name} = {value}); its settings: {leaves}"
    # pydantic writes "Input should be ...", "String should have ..." or "Value error, should ...".
    message = re.sub("^(Input|String|Value error,) ", "", problem["msg"])
    if name == "train.max_steps" and problem["type"] == "greater_than":
        message += f"; {program_name('evaluate')} RUN|MODEL evaluates without training"
    return f"{name} = {value} is wrong: {message}"


def help_text(program: str, commands: Sequence[str] = (), *, topic: str = "") -> str:
    """Return the text of --help TOPIC, as wide as the terminal.

    A topic is a section, or a word in the name or the description of settings; without a topic,
    the sections are listed. The help of pydantic_config takes 0.8 s. Raises ConfigError for a word
    that no setting has.
    """
    sections = {**section_models(), "env": EnvSection}
    topic = topic.removeprefix("--").replace("-", "_").lower()
    if not topic:
        return _overview(program, commands, sections)
    # Arrays of tables, such as [[eval.env]], have the settings of the section env.
    settings = [
        (name, leaf if name == "env" else f"--{name}.{leaf}", field)
        for name, section in sections.items()
        for leaf, field in section.model_fields.items()
        if not row_model_of(field)
    ]
    if topic in sections:
        introduction = f"[{topic}] {cleandoc(sections[topic].__doc__ or '')}"
        if topic == "env":
            introduction += " In files only, as [[env]] or [[eval.env]]."
        found = [_setting_help(flag, field) for name, flag, field in settings if name == topic]
        losses = f"\n{named_losses.help_text()}" if topic == "loss" else ""
        return f"{introduction}\n{''.join(found)}{losses}"
    found = [
        _setting_help(flag, field)
        for name, flag, field in settings
        if name != "env"
        and (topic in flag or topic in (field.description or "").lower().replace("-", "_"))
    ]
    if not found:
        leaves = [flag.rpartition(".")[2] for name, flag, _ in settings if name != "env"]
        hint = did_you_mean(topic, [*sections, *leaves], f"{program} --help {{}}")
        raise ConfigError(
            f"no setting has '{topic}' in its name or description; {hint}{' ' * bool(hint)}"
            f"{program} --help lists the sections"
        )
    return "".join(found)


def _overview(program: str, commands: Sequence[str], sections: Mapping[str, type[Section]]) -> str:
    """Return the usage and one line for each section."""
    usage = f"{program} {{{','.join(commands)}}}" if commands else program
    lines = [USAGE.format(usage=usage, example=" ".join([program, *commands[:1]]))]
    for name, section in sections.items():
        first_sentence = " ".join(cleandoc(section.__doc__ or "").split()).partition(". ")[0]
        lines.append(f"  {name:<12}{first_sentence.rstrip('.')}\n")
    lines.append("\n")
    for command, text in MORE_HELP.items():
        lines.append(f"{command.format(program=program):<32}{text}\n")
    return "".join(lines)


def _setting_help(name: str, field: FieldInfo) -> str:
    """Return the lines of --help for one setting, as wide as the terminal.

    `name` is a key in a file, or begins with -- as an option.
    """
    width = max(80, shutil.get_terminal_size().columns)
    option = name.replace("_", "-") if name.startswith("--") else name
    flag = f"  {option} {default_text(field)}"
    description = field.description or ""
    if get_origin(field.annotation) is Literal:
        description += f" ({', '.join(map(str, get_args(field.annotation)))})"
    indent = f"\n{'':<43}"
    first = f"{flag:<43}" if len(flag) < 43 else flag + indent
    lines = textwrap.wrap(description, width - len(indent), break_on_hyphens=False)
    return f"{first}{indent.join(lines)}\n"


def _split_arguments(arguments: Sequence[str]) -> list[str]:
    """Split `@file` and options of tables into two words each, as pydantic_config requires."""
    words: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        is_table = value[:1] in ("{", "[") or flag.count(".") > 1
        if argument.startswith(FILE_SIGN) and argument != FILE_SIGN:
            words += [FILE_SIGN, argument[1:]]
        elif flag.startswith("--") and equals and is_table:
            words += [flag, value]
        else:
            words.append(argument)
    return words


def _check_words(words: Sequence[str], program: str) -> None:
    """Raise ConfigError for an option without the value that it needs, and for other words."""
    known = known_fields()
    takes_value = False
    for word, following in pairwise([*words, "--"]):  # "--" follows the last word
        if word == FILE_SIGN:
            takes_value = True
        elif not word.startswith("--"):
            if not takes_value:
                raise ConfigError(_explain_stray_word(word, program))
            takes_value = False
        else:
            flag, equals, value = word.partition("=")
            section, _, leaf = flag.removeprefix("--").replace("-", "_").partition(".")
            kind = known.get(section, {}).get(leaf)
            if section in known and not leaf and following != FILE_SIGN:
                raise ConfigError(_explain_section(section, value if equals else following))
            # An unknown option (None) is reported later.
            if not equals and kind not in (None, bool) and following.startswith("--"):
                raise ConfigError(f"{flag} has no value; write {flag} VALUE (or {flag}=VALUE)")
            takes_value = not equals and (kind is not bool or following in BOOLS)


def _explain_stray_word(word: str, program: str) -> str:
    """Explain a word that is neither an option nor its value."""
    if word.endswith(".toml"):
        return f"config file {word} needs an {FILE_SIGN}: {program} {FILE_SIGN} {word}"
    return (
        f"unexpected argument {word!r}; settings are written --section.name VALUE, config files "
        f"{FILE_SIGN} FILE.toml"
    )


def _explain_section(section: str, value: str) -> str:
    """Explain an option that is the name of a section."""
    leaves = known_fields()[section]
    leaf = next((leaf for leaf in ("name", "train", "dir") if leaf in leaves), None)
    if leaf is None:
        return f"--{section} is a section; its settings: {', '.join(leaves)}"
    shown = "VALUE" if value.startswith("--") else value
    return f"--{section} is a section; did you mean --{section}.{leaf} {shown}?"
