"""Estimate the memory and network traffic of sharded tables.

Nothing is measured: sizes, bytes and seconds are computed from the options.

Example:
  sparsestep plan --tables user=10000000000x128 item=1000000x64 --ranks 1024
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from sparsestep.cli.options import add_number, float_in_range, int_in_range
from sparsestep.distributed.placement import PLACEMENTS
from sparsestep.distributed.plan import Plan, TableSize, choose_placements, format_bytes
from sparsestep.errors import InputError, message

_MOST = 1 << 40
_TOO_LARGE = 1 << 62  # for a row to have a number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparsestep plan``."""
    parser.add_argument(
        "--tables",
        nargs="+",
        required=True,
        type=_parse_table,
        metavar="NAME=ROWSxDIM",
        help="the tables; append :tables, :rows or :copy to choose how one is sharded",
    )
    add_number(parser, "--ranks", int_in_range(1, 100_000), 8, "number of ranks")
    add_number(parser, "--batch", int_in_range(1, _MOST), 1024, "bags per rank and step")
    add_number(parser, "--ids", float_in_range(1, 1e6), 1.0, "ids per bag")
    state = "state values per element: 2 for Adam, 0 for plain SGD"
    add_number(parser, "--state", float_in_range(0, 8), 2.0, state)
    network = "network speed of a rank in Gbit/s"
    add_number(parser, "--network", float_in_range(0.001, 1e5), 10.0, network, "GBIT")
    add_number(parser, "--bytes", int_in_range(1, 8), 4, "bytes per element of a table")


def run(options: argparse.Namespace) -> int:
    """Print the plan and its totals."""
    names = [name for name, _, _, _ in options.tables]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        requirement = "every table must have a name of its own"
        print(f"sparsestep plan: {message(requirement, f'{twice[0]!r} twice')}", file=sys.stderr)
        return 2
    tables = [TableSize(name, rows, dim, options.bytes) for name, rows, dim, _ in options.tables]
    asked = {name: kind for name, _, _, kind in options.tables if kind}
    try:
        chosen = choose_placements(tables, options.ranks, asked)
    except InputError as error:
        print(f"sparsestep plan: {error}", file=sys.stderr)
        return 2
    lengths = dict.fromkeys(names, options.ids)
    plan = Plan(chosen, options.ranks, options.batch, lengths)
    print(plan)
    print(format_totals(plan, options.state, options.network))
    return 0


def format_totals(plan: Plan, state: float, network: float) -> str:
    """Memory and traffic of a rank, with ``state`` float32 values per element."""
    most = max(range(plan.world_size), key=plan.bytes_on)
    weights = plan.bytes_on(most)
    of_state = state * sum(4 * p.rows_on(most, plan.world_size) * p.dim for p in plan.placements)
    sent = sum(
        p.bytes_per_step(plan.world_size, plan.batch, plan.lengths.get(p.name, 1.0))
        for p in plan.placements
    )
    busiest = max(plan.bytes_sent_by(rank) for rank in range(plan.world_size))

    def a_step(size: float) -> str:
        milliseconds = 8e3 * size / (network * 1e9)
        return f"{format_bytes(size)} a step, {milliseconds:.1f} ms at {network:g} Gbit/s"

    return (
        f"\nmemory per rank, at most: {format_bytes(weights + of_state)} "
        f"({format_bytes(weights)} of tables, {format_bytes(of_state)} of state)\n"
        f"sent by a rank: {a_step(sent)}\n"
        f"busiest rank: {a_step(busiest)}"
    )


def _parse_table(text: str) -> tuple[str, int, int, str]:
    name, _, rest = text.partition("=")
    size, _, kind = rest.partition(":")
    rows, _, dim = size.partition("x")
    if not name or not _is_positive_int(rows) or not _is_positive_int(dim):
        requirement = "a table must be NAME=ROWSxDIM, like user=1000000x64"
        raise argparse.ArgumentTypeError(message(requirement, repr(text)))
    if rest != size and kind not in PLACEMENTS:
        kinds = ", ".join(f":{known}" for known in PLACEMENTS)
        requirement = f"what follows the size must be one of {kinds}"
        raise argparse.ArgumentTypeError(message(requirement, repr(f":{kind}")))
    return name, int(rows), int(dim), kind


def _is_positive_int(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < _TOO_LARGE
