"""The entry of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ... import __version__
from ...compress.builder.spelling import did_you_mean
from ..results.optional import way_to_install
from .commands import COMMANDS, Command

PROGRAM = "gradwire"
TRACEBACK_VARIABLE = "GRADWIRE_TRACEBACK"
DESCRIPTION = """\
Try, measure and monitor gradient compression for PyTorch data-parallel training.

examples:
  gradwire compare --link 100mbit
  gradwire plan --model gpt-0.9m --workers 16"""
REFUSED, INTERRUPTED = 2, 130  # exit codes, as shells have them


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run a command line; its exit code: 0, 2 for what is refused here or by the system, 130 for Ctrl-C, or its own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _top_parser(commands)
    if given and not given[0].startswith("-") and given[0] not in commands:
        hint = did_you_mean(given[0], commands)
        return _refuse(PROGRAM, f"unknown command {given[0]!r}{hint}; there are: {', '.join(commands)}")
    name = parser.parse_args(given[:1] or ["--help"]).command
    prog = f"{PROGRAM} {name}"
    try:
        from .parsing import configuration  # here, so that a missing jsonargparse is reported like any other library

        return commands[name].run(configuration(commands[name], prog, given[1:]))
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _refuse(prog, str(error), of_host=isinstance(error, OSError))
    except ModuleNotFoundError as error:
        if (way := way_to_install(error)) is None:
            raise
        return _refuse(prog, way, of_host=True)
    except KeyboardInterrupt:
        return INTERRUPTED


def _refuse(prog: str, message: str, *, of_host: bool = False) -> int:
    """Print why a command is refused; its exit code. Of torchrun's ranks one prints: the first, or that `of_host`."""
    if os.environ.get("LOCAL_RANK" if of_host else "RANK", "0") == "0":
        print(f"{prog}: error: {message}", file=sys.stderr)
    return REFUSED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse as for any other reason, once for all ranks."""
        sys.exit(_refuse(self.prog, message))


def _top_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [options]",
        description=DESCRIPTION,
        epilog=f"{PROGRAM} COMMAND --help shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    table = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        table.add_parser(name, help=command.help, add_help=False)
    return parser
