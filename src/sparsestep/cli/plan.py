"""Estimate the memory, network traffic and CPU of sharded tables.

Nothing is measured: everything is computed from the options. CPU times are
those of an AMD core with AVX2, by benchmarks/simulated_ranks.py.

Example:
  sparsestep plan --tables user=10000000000x128 item=1000000x64 --ranks 1024
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable

from sparsestep.cli.options import add_number, float_in_range, int_in_range
from sparsestep.distributed.placement import PLACEMENTS
from sparsestep.distributed.plan import Plan, TableSize, choose_placements, format_bytes
from sparsestep.errors import InputError, message

_MOST = 1 << 40
# Milliseconds of CPU per step: for each table, for each table and rank, for each megabyte that is
# sent and received, and for each bag and id that is looked up and updated.
_CPU_TABLE, _CPU_MESSAGE, _CPU_MEGABYTE, _CPU_BAG, _CPU_ID = 0.27, 0.001, 0.6, 0.00023, 0.00007
# Collectives of a step with lockstep and without clipping, one after the other. Gloo takes two
# delays for each: the receiver first says that it is ready.
_COLLECTIVES, _DELAYS = 5, 2
# Process groups with a connection to every rank: torch's own, that of shard, and that of
# lockstep(prefetch=1). A process has some other files open.
_GROUPS, _OTHER_FILES = 3, 30
_MAX_RANKS = 1 << 14  # that are looked at for limits
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
    latency = "time of a message from one rank to another in microseconds"
    add_number(parser, "--latency", float_in_range(0, 1e6), 50.0, latency, "US")
    add_number(parser, "--bytes", int_in_range(1, 8), 4, "bytes per element of a table")
    parser.add_argument(
        "--wire", choices=("bf16", "int8"), help="send rows and gradients in fewer bytes"
    )


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

    def plan_for(ranks: int) -> Plan:
        placements = choose_placements(tables, ranks, asked, options.wire)
        return Plan(placements, ranks, options.batch, dict.fromkeys(names, options.ids))

    def costs(ranks: int) -> StepCosts:
        return StepCosts(plan_for(ranks), options.network, options.latency)

    try:
        plan = plan_for(options.ranks)
    except InputError as error:
        print(f"sparsestep plan: {error}", file=sys.stderr)
        return 2
    print(plan)
    print(format_totals(plan, options.state, options.network))
    cost = costs(options.ranks)
    print(
        f"CPU of the busiest rank: {cost.work:.1f} ms for lookups and updates, "
        f"{cost.messages:.1f} ms for messages\n"
        f"waiting: {cost.latency:.1f} ms for {_COLLECTIVES} collectives one after the other"
    )
    print(format_limits(costs, _max_open_files()))
    return 0


class StepCosts:
    """Milliseconds of a step of the busiest rank.

    Example:
        >>> from sparsestep.distributed.placement import ByRow
        >>> costs = StepCosts(Plan([ByRow("user", 1000, 64, 4)], 8, batch=1000), 10, latency=50)
        >>> round(costs.work, 2), round(costs.messages, 2), round(costs.network, 2), costs.latency
        (0.3, 0.55, 0.36, 0.5)
    """

    def __init__(self, plan: Plan, network: float, latency: float) -> None:
        sent, tables = plan.most_bytes_sent(), len(plan.placements)
        ids = sum(plan.batch * plan.lengths.get(p.name, 1.0) for p in plan.placements)
        # Work that one process would do, too.
        self.work: float = _CPU_BAG * plan.batch * tables + _CPU_ID * ids
        self.messages: float = (
            _CPU_TABLE * tables
            + _CPU_MESSAGE * tables * plan.world_size
            + _CPU_MEGABYTE * sent / 1e6
        )
        self.network: float = 8e3 * sent / (network * 1e9)
        self.latency: float = _COLLECTIVES * _DELAYS * latency / 1e3


def format_limits(costs: Callable[[int], StepCosts], open_files: int | None) -> str:
    """From how many ranks on each resource takes longer than lookups and updates."""
    found: dict[str, int] = {}
    ranks = 2
    while ranks <= _MAX_RANKS:
        each = costs(ranks)
        times = {"network": each.network, "CPU for messages": each.messages}
        times["latency"] = each.latency
        for name, time in times.items():
            if time > each.work:
                found.setdefault(name, ranks)
        ranks *= 2
    lines = [f"{name} from {ranks} ranks on" for name, ranks in found.items()]
    if open_files is not None:
        most = (open_files - _OTHER_FILES) // _GROUPS + 1
        lines.append(f"sockets from {most} ranks on (ulimit -n {open_files})")
    return f"limits, where they outweigh lookups and updates: {'; '.join(lines) or 'none'}"


def _max_open_files() -> int | None:
    """The number of files that a process may have open; ``None`` if there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def format_totals(plan: Plan, state: float, network: float) -> str:
    """Memory and traffic of a rank, with ``state`` float32 values per element."""
    most = max(range(plan.world_size), key=plan.bytes_on)
    weights = plan.bytes_on(most)
    of_state = state * sum(4 * p.rows_on(most, plan.world_size) * p.dim for p in plan.placements)
    sent = sum(
        p.bytes_per_step(plan.world_size, plan.batch, plan.lengths.get(p.name, 1.0))
        for p in plan.placements
    )
    busiest = plan.most_bytes_sent()

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
