"""From assignments to a command's configuration, by jsonargparse: types, help, `--print-config`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from .arguments import (
    CONFIG_FLAG,
    END_OF_OPTIONS,
    Assignment,
    Fields,
    assignments,
    described,
    fields_of,
    item_type,
    split_specs,
    usage,
)
from .commands import Command

HELP_FLAGS = ("-h", "--help")
PRINT_FLAGS = ("--print-config", "--print_config")


def configuration(command: Command, prog: str, arguments: Sequence[str]) -> Any:
    """The command's configuration from its arguments; `--help` and `--print-config` print and exit.

    Raises ValueError for what is not accepted, saying what is.
    """
    config_class = command.config_class()
    fields = fields_of(config_class)
    parser = _parser(command, config_class, prog)
    end = list(arguments).index(END_OF_OPTIONS) if END_OF_OPTIONS in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    if set(HELP_FLAGS) & set(options):
        _help(parser, fields, assignments([], fields, command.defaults))
    printing = [each for each in options if each.partition("=")[0] in PRINT_FLAGS]
    words = [*(each for each in options if each not in printing), *rest]
    given = assignments(words, fields, command.defaults, command.positional)
    flags = [_flag(each, fields) for each in given] + [each.replace("-config", "_config") for each in printing]
    try:
        values = parser.instantiate(parser.parse_args(flags))
    except argparse.ArgumentError as error:
        raise ValueError(_refusal(parser, given, fields) or " ".join(str(error).split())) from error
    return config_class(**{name: value for name, value in vars(values).items() if name != "config"})


def _flag(assignment: Assignment, fields: Fields) -> str:
    """An assignment as jsonargparse takes it."""
    text = assignment.text
    item = item_type(fields[assignment.key])
    if item is not None and text != "null" and not text.lstrip().startswith("["):
        text = json.dumps(split_specs(text)) if item is str else f"[{text}]"
    return f"--{assignment.key}={text}"


def _refusal(parser: ArgumentParser, given: list[Assignment], fields: Fields) -> str:
    """Which assignment is not accepted, and what would be."""
    for each in given:
        try:
            parser.parse_args([_flag(each, fields)])
        except argparse.ArgumentError:
            return f"{each.shown} takes {described(fields[each.key])}, got {each.text!r}"
    return ""


def _help(parser: ArgumentParser, fields: Fields, defaults: list[Assignment]) -> NoReturn:
    """Print the help, with the defaults of the command's own file, and exit."""
    values = parser.parse_args([_flag(each, fields) for each in defaults])
    parser.set_defaults({key: values[key] for key in fields})
    parser.print_help()
    sys.exit(0)


class Choices(DefaultHelpFormatter):
    """Shows what an option may be as `a|b`."""

    def _expand_help(self, action: argparse.Action) -> str:
        text: str = super()._expand_help(action)
        return re.sub(r"Literal\[([^]]*)\]", lambda found: "|".join(re.findall(r"[^', ]+", found[1])), text)


def _parser(command: Command, config_class: type[Any], prog: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    fields = fields_of(config_class)
    line = f"{prog} [options] {usage(command.positional, fields)}" if command.positional else None
    parser = ArgumentParser(prog=prog, usage=line, description=command.help, exit_on_error=False)
    parser.formatter_class = Choices
    default = f" (default: the shipped {command.defaults.name})" if command.defaults else ""
    parser.add_argument(CONFIG_FLAG, action="config", help=f"YAML file; later flags win{default}")
    parser.add_class_arguments(config_class)
    for action in parser._actions:
        _polish(action, fields)
    return parser


def _polish(action: argparse.Action, fields: Fields) -> None:
    """Make help show flags as they are written here: dashes, commas, `--model NAME`."""
    action.option_strings = [each.replace("_", "-") for each in action.option_strings if not each.endswith("+")]
    if f"{action.dest}.name" in fields:
        action.metavar, action.help = "NAME", f"short for --{action.dest}.name"
    elif item_type(fields.get(action.dest)):
        action.metavar = "A,B,..."
