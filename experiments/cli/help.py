"""The text of `gradwire COMMAND --help`: a sentence, examples, and options in groups, the common ones first."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from .arguments import Fields, item_type, usage
from .commands import Command

LABORATORY = ("compute", "dilate", "link", "netlab", "simulated")
ARGUMENTS, COMMON, OPTIONS, MORE = "arguments", "common options", "options", "more options"
EMULATED = "laboratory options (emulated hosts, networks and accelerators)"
EVERY_COMMAND = "options of every command"
METAVARS = {
    "checkpoints": "PATH",
    "json": "FILE",
    "link": "RATE",
    "local_outer": "OPTIMIZER",
    "model": "NAME",
    "data": "NAME",
    "delay": "TIME",
    "down": "RATE",
    "jitter": "TIME",
    "loss": "PERCENT",
    "out": "PATH",
    "parameters": "N",
    "path": "PATH",
    "rate": "RATE",
    "utilization": "FILE",
}
OF_TYPE = {int: "N", float: "X", str: "A"}
HELP = {
    "help": "show this help and exit",
    "print_config": "print all options as YAML, for --config, and exit",
}


class Formatter(DefaultHelpFormatter):
    """Keeps the lines of the description, and adds nothing to the text of an option."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        sentence, *examples = text.splitlines()
        return "\n".join([super()._fill_text(sentence, width, indent), *examples])

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help or ""


def arrange(parser: ArgumentParser, command: Command, fields: Fields, defaults: Mapping[str, Any]) -> None:
    """Show options as they are written on the command line, with their defaults, in groups."""
    actions = {action.dest: action for action in parser._actions}
    groups: dict[str, list[argparse.Action]] = {}
    for dest in dict.fromkeys((*command.common, *fields, *actions)):
        key = f"{dest}.name" if f"{dest}.name" in fields else dest  # `--model NAME` is short for `--model.name NAME`
        if key not in fields and dest not in ("config", *HELP):
            continue
        if dest.endswith(".name"):
            continue
        action = actions[dest]
        action.option_strings = [each.replace("_", "-") for each in action.option_strings if not each.endswith("+")]
        action.metavar = _metavar(dest, fields.get(key), defaults.get(key), action)
        if dest in command.positional:
            action.option_strings, action.metavar = [], usage([dest], fields)
        action.help = HELP.get(dest, actions[key].help) if key in actions else HELP[dest]
        action.help = f"{action.help}{_default(defaults.get(key))}"
        groups.setdefault(_group(dest, command, fields), []).append(action)
    first, last = (ARGUMENTS, COMMON, OPTIONS, MORE), (EMULATED, EVERY_COMMAND)
    order = (*first, *sorted(groups.keys() - {*first, *last}), *last)
    parser._action_groups = [_titled(parser, title, groups[title]) for title in order if title in groups]


def _titled(parser: ArgumentParser, title: str, actions: list[argparse.Action]) -> Any:
    group = parser.add_argument_group(title)
    group._group_actions = actions
    return group


def _group(dest: str, command: Command, fields: Fields) -> str:
    """The title of the group that shows an option."""
    first, dot, _ = dest.partition(".")
    if dest in command.positional:
        return ARGUMENTS
    if dest in command.common:
        return COMMON
    if dest not in fields and f"{dest}.name" not in fields:
        return EVERY_COMMAND
    if first in LABORATORY:
        return EMULATED
    if dot:
        return f"{first} options"
    return MORE if command.common else OPTIONS


def _metavar(dest: str, hint: Any, default: Any, action: argparse.Action) -> Any:
    """Return the text behind a flag; nothing if a flag alone means true."""
    name = dest.rpartition(".")[2]
    kinds = {hint, *get_args(hint)}
    if hint is None:
        return {"config": "FILE", "print_config": ""}.get(dest, action.metavar)
    if dict in (get_origin(hint), get_origin(item_type(hint))):
        return "YAML"
    if item := item_type(hint):
        each = OF_TYPE.get(item, "A")
        return f"{each},{'B' if each == 'A' else each},..."
    if hint is bool and default is False:
        return ""
    if hint is bool or get_origin(hint) is Literal:
        return action.metavar
    if choices := [get_args(kind) for kind in kinds if get_origin(kind) is Literal]:  # or nothing
        return f"{{{','.join(choices[0])}}}"
    numbers = [OF_TYPE[kind] for kind in (int, float) if kind in kinds]
    return numbers[0] if numbers else METAVARS.get(name, name.replace("_", "-").upper())


def _default(value: Any) -> str:
    """A default in brackets; nothing where there is none."""
    if value is None or value is False or value == "" or (isinstance(value, list | dict) and not value):
        return ""
    if isinstance(value, list):
        value = ",".join(map(_text, value))
    return f" (default: {_text(value)})"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
