"""Time optimizer steps: sparsestep, torch, other libraries, and the limit.

The limit is the time that the machine needs just to move the memory.
Contestants take turns within one run, with fresh rows in every step, and
medians are compared. FBGEMM and DGL take part if they are installed. A suite is
a list of cases; the default one takes a few minutes. The suite "programs" times
whole training iterations (lookup, model, backward and step). The suite "rules"
compares formulas of sparsestep.rule with the built-in rules.

Example:
  python -m benchmarks --suite lookups --json lookups.json --svg lookups.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import custom_rules, training_iterations
from benchmarks.harness import figure, results
from benchmarks.harness import race as harness
from benchmarks.harness.cases import SUITES, Formula, Program
from benchmarks.harness.contestants import Contestant, TorchSparseAdam
from benchmarks.harness.limit import Limit
from benchmarks.harness.report import Screen
from sparsestep.cli.options import float_in_range, int_in_range, output_path
from sparsestep.errors import message

_ALL = "all"
_PICTURED = "lookups"
_KEPT = (TorchSparseAdam.name, Limit.name)  # what the ratios are taken of
_BAD_OPTIONS = 2  # argparse's own exit code
_INTERRUPTED = 130  # what shells expect of a program that SIGINT ended


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks``."""
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--suite",
        type=suite,
        action="append",
        metavar="NAME",
        help=f"suite to run: {', '.join(SUITES)} or {_ALL}; may be repeated (default: peers)",
    )
    parser.add_argument(
        "--only",
        type=contestant,
        action="append",
        default=[],
        metavar="NAME",
        help="run only contestants with this in their name, plus torch SparseAdam and the "
        "limit; may be repeated",
    )
    parser.add_argument(
        "--without",
        type=contestant,
        action="append",
        default=[],
        metavar="NAME",
        help="skip contestants with this in their name; may be repeated",
    )
    parser.add_argument(
        "--seconds",
        type=float_in_range(0.001, 86_400),
        default=20.0,
        metavar="S",
        help="time per case, without warm-up (default: 20)",
    )
    parser.add_argument(
        "--threads",
        type=int_in_range(1, 1024),
        metavar="N",
        help="number of threads (default: torch's choice)",
    )
    parser.add_argument(
        "--scale",
        type=float_in_range(1, 1_000_000),
        default=1.0,
        metavar="F",
        help="divide rows and lookups by this, for a quick look (default: 1)",
    )
    parser.add_argument(
        "--json",
        type=output_path(".json"),
        metavar="FILE",
        help="JSON file for the results; written after each case",
    )
    parser.add_argument(
        "--svg",
        type=output_path(".svg"),
        metavar="FILE",
        help=f"SVG file for a picture of the suite {_PICTURED}",
    )
    return parser


def suite(text: str) -> str:
    """A converter for argparse that refuses what is no suite."""
    if text not in SUITES and text != _ALL:
        requirement = f"it must be one of {', '.join(SUITES)}, {_ALL}"
        raise argparse.ArgumentTypeError(message(requirement, repr(text)))
    return text


def contestant(text: str) -> str:
    """A converter for argparse that refuses what is in no contestant's name."""
    names = [each.name for each in harness.CONTESTANTS]
    if not text or not any(_matches(text, name) for name in names):
        requirement = f"it must be a part of one of these: {', '.join(names)}"
        raise argparse.ArgumentTypeError(message(requirement, repr(text)))
    return text


def _matches(part: str, name: str) -> bool:
    return part.lower() in name.lower()


def chosen(only: Sequence[str], without: Sequence[str]) -> list[type[Contestant]]:
    """Who takes part.

    Example:
        >>> [each.name for each in chosen(only=["reference"], without=["limit"])]
        ['torch SparseAdam', 'sparsestep reference']
    """
    return [
        each
        for each in harness.CONTESTANTS
        if (not only or each.name in _KEPT or any(_matches(part, each.name) for part in only))
        and not any(_matches(part, each.name) for part in without)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show; returns the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    named = options.suite or ["peers"]
    suites = list(SUITES) if _ALL in named else list(dict.fromkeys(named))
    contestants = chosen(options.only, options.without)
    if not contestants:
        return _refuse("--only and --without must leave a contestant. Got none.")
    if options.svg and _PICTURED not in suites:
        return _refuse(
            f"--svg must come with --suite {_PICTURED}, which it draws. Got {', '.join(suites)}."
        )
    with harness.threads(options.threads):
        report = results.new_report(options.scale, options.seconds)
        screen = Screen()
        screen.begin(report)
        for name in suites:
            _run_suite(name, contestants, options.json, report, screen)
    if options.svg:
        pictured = [result for result in report.cases if result.suite == _PICTURED]
        figure.draw(options.svg, pictured)
        screen.say(f"\nThe picture: {options.svg}")
    if options.json:
        screen.say(f"\nThe results: {options.json}")
    return 0


def _refuse(message: str) -> int:
    print(f"benchmarks: error: {message}", file=sys.stderr)
    return _BAD_OPTIONS


def _run_suite(
    name: str,
    contestants: Sequence[type[Contestant]],
    out: Path | None,
    report: results.Report,
    screen: Screen,
) -> None:
    measured = []
    for case in SUITES[name]:
        smaller = case.scaled(report.scale)
        with screen.progress(smaller.name) as follow:
            if isinstance(smaller, Program):
                result = training_iterations.measure_iteration(
                    smaller, name, report.seconds, follow
                )
            elif isinstance(smaller, Formula):
                result = custom_rules.measure_rule(smaller, name, report.seconds, follow)
            else:
                result = harness.measure(smaller, name, contestants, report.seconds, follow)
        screen.show(result)
        measured.append(result)
        report.cases.append(result)
        if out:  # now, so that an interrupted run is not lost
            out.write_text(report.to_json(), encoding="utf-8")
    screen.summarise(name, measured)


if __name__ == "__main__":
    sys.exit(main())
