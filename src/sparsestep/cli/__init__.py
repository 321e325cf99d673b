"""The command line: ``sparsestep demo``, ``info`` and ``plan``.

A command is a module with a docstring (its help), ``add_arguments`` and ``run``. matplotlib and
rich, which only the command line needs, are imported when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from sparsestep.cli import demo, info, plan
from sparsestep.version import __version__

COMMANDS: dict[str, ModuleType] = {"demo": demo, "info": info, "plan": plan}

_FAILED = 1
_INTERRUPTED = 130  # the exit code that shells expect after SIGINT

_EXAMPLES = """\
Examples:
  sparsestep demo               compare with torch's SparseAdam
  sparsestep info               what to paste into a bug report
  sparsestep plan --tables user=1000000x64 --ranks 8   do the tables fit?
  sparsestep demo --help        the options of a command
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="sparsestep",
        description="Optimizers for PyTorch that cost what the batch uses.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sparsestep {__version__}")
    commands = parser.add_subparsers(metavar="command")
    for name, command in COMMANDS.items():
        text = command.__doc__ or ""
        subparser = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            _flush()  # a write error is raised here, not when the interpreter ends
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        _discard_output()
        return _FAILED
    except OSError as error:
        _discard_output()
        with contextlib.suppress(OSError):  # stderr may be closed, too
            print(f"sparsestep: cannot continue: {error}.", file=sys.stderr, flush=True)
        return _FAILED


def _run(arguments: Sequence[str] | None) -> int:
    try:
        parser = make_parser()
        options = parser.parse_args(arguments)
        if "run" not in options:
            parser.print_help()
            return 0
        code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "rich"):
            raise
        remedy = 'install it with pip install "sparsestep[cli]"'
        print(f"sparsestep: this command needs {package}; {remedy}.", file=sys.stderr)
        return _FAILED


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _discard_output() -> None:
    """Discard buffered output, so that the interpreter does not fail on it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
