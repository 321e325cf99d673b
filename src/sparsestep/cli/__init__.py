"""The command line: ``sparsestep demo``, ``info`` and ``plan``.

A command is a module with a docstring (its help), ``add_options`` and ``run``. What only the
command line needs (rich, matplotlib) is imported when a command runs, never before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from sparsestep.cli import demo, info, plan
from sparsestep.version import __version__


class Command(Protocol):
    """What a command's module has."""

    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare the command's options; a bad value is refused while they are parsed."""

    def run(self, options: argparse.Namespace, /) -> int:
        """Do it; returns the exit code."""


# The one place where commands are registered: a line each.
COMMANDS: dict[str, Command] = {
    "demo": demo,
    "info": info,
    "plan": plan,
}

_EXTRA = ("rich", "matplotlib")  # what sparsestep[cli] brings
_MISSING = 1
_UNWRITTEN = 1
_INTERRUPTED = 130  # what shells expect of a program that SIGINT ended

_EXAMPLES = """\
Examples:
  sparsestep demo               compare with torch's SparseAdam
  sparsestep info               what to paste into a bug report
  sparsestep plan --tables user=1000000x64 --ranks 8   do the tables fit?
  sparsestep demo --help        the options of a command
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Example:
        >>> parser().parse_args(["demo", "--steps", "10"]).steps
        10
    """
    result = argparse.ArgumentParser(
        prog="sparsestep",
        description="Optimizers for PyTorch whose work is proportional to what the batch touched.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="version", version=f"sparsestep {__version__}")
    commands = result.add_subparsers(metavar="command")
    for name, command in COMMANDS.items():
        text = command.__doc__ or ""
        its_parser = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(its_parser)
        its_parser.set_defaults(run=command.run)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: what follows ``sparsestep`` on the command line; by default, just that.
    """
    try:
        try:
            return _run(arguments)
        finally:
            _flush()  # what cannot be written shows here, and not when the interpreter ends
    except BrokenPipeError:  # whoever was reading has seen enough
        _stop_writing()
        return _UNWRITTEN
    except OSError as error:
        _stop_writing()
        with contextlib.suppress(OSError):  # stderr may be what cannot be written
            print(f"sparsestep: cannot continue: {error}.", file=sys.stderr, flush=True)
        return _UNWRITTEN


def _run(arguments: Sequence[str] | None) -> int:
    try:
        known = parser()
        options = known.parse_args(arguments)
        if "run" not in options:
            known.print_help()
            return 0
        code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        remedy = 'pip install "sparsestep[cli]"'
        print(f"sparsestep: this command needs {name}; install it with {remedy}.", file=sys.stderr)
        return _MISSING


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _stop_writing() -> None:
    """Send what is still in the streams' buffers nowhere, so that nobody complains at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
