"""From assignments to a command's configuration, by jsonargparse: types, help, `--print-config`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, set_parsing_settings

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
from .help import Formatter, arrange

HELP_FLAGS = ("-h", "--help")
READ = "read options from a YAML file, or from a shipped one by its name"
PRINT_FLAGS = ("--print-config", "--print_config")


def configuration(command: Command, prog: str, arguments: Sequence[str]) -> Any:
    """The command's configuration from its arguments; `--help` and `--print-config` print and exit.

    Raises ValueError for what is not accepted, saying what is.
    """
    config_class = command.config_class()
    fields = fields_of(config_class)
    end = list(arguments).index(END_OF_OPTIONS) if END_OF_OPTIONS in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    if set(HELP_FLAGS) & set(options):
        parser_for_help(command, prog).print_help()
        sys.exit(0)
    parser = _parser(command, config_class, prog)
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
    """Return the message for the first assignment that is not accepted."""
    for each in given:
        try:
            parser.parse_args([_flag(each, fields)])
        except argparse.ArgumentError:
            return f"{each.shown} takes {described(fields[each.key])}, got {each.text!r}"
    return ""


def parser_for_help(command: Command, prog: str) -> ArgumentParser:
    """Return the parser whose groups, flags and texts are those of `--help`, with the defaults of the command's own file."""
    config_class = command.config_class()
    parser, fields = _parser(command, config_class, prog), fields_of(config_class)
    values = parser.parse_args([_flag(each, fields) for each in assignments([], fields, command.defaults)])
    arrange(parser, command, fields, {key: values[key] for key in fields})
    return parser


def _parser(command: Command, config_class: type[Any], prog: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    fields = fields_of(config_class)
    words = f" {usage(command.positional, fields)}" if command.positional else ""
    parser = ArgumentParser(prog=prog, usage=f"{prog} [options]{words}", exit_on_error=False)
    parser.description = "\n".join([command.help, "", "examples:", *(f"  {each}" for each in command.examples)])
    parser.formatter_class = Formatter
    default = f" (default: the shipped {command.defaults.name})" if command.defaults else ""
    parser.add_argument(CONFIG_FLAG, action="config", metavar="FILE", help=f"{READ}{default}")
    parser.add_class_arguments(config_class)
    return parser
