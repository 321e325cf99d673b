"""Several hosts: ``topology="hosts"``, and a check of the host name before ranks connect."""

from __future__ import annotations

import ipaddress
import os
import socket
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep._native import ext
from sparsestep.distributed.collectives import Collectives, new_group
from sparsestep.engines.base import certain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HostCollectives(Collectives):
    """The same results with fewer connections: of each host, one rank exchanges with other hosts.

    A rank has connections to those of its own host, and the first of these to that of every other
    host. Messages to other hosts go to the first rank, to that of the other host, and on from it.
    """

    def __init__(
        self, group: ProcessGroup, names: Sequence[str], backend: str | None = None
    ) -> None:
        """``names`` are those of the hosts of all ranks."""
        super().__init__(group)
        self.names = names
        ranks = dist.get_process_group_ranks(group)
        hosts = [
            [rank for rank, other in enumerate(names) if other == name]
            for name in dict.fromkeys(names)
        ]
        mine = next(n for n, host in enumerate(hosts) if self.rank in host)
        self._host: list[int] = hosts[mine]
        self._is_leader: bool = self.rank == self._host[0]
        groups = [new_group(backend, [ranks[rank] for rank in host]) for host in hosts]
        self._local = groups[mine]
        self._leaders = new_group(backend, [ranks[host[0]] for host in hosts])
        others = [(n, rank) for n, host in enumerate(hosts) if n != mine for rank in host]
        self._num_hosts = len(hosts)
        self._others = torch.tensor([rank for _, rank in others], dtype=torch.int64)
        self._host_of_other = torch.tensor([n for n, _ in others], dtype=torch.int64)
        # Messages that leaders exchange are ordered by hosts, then senders, then receivers.
        local, other = range(len(self._host)), range(len(others))
        sent = sorted((others[o][0], m, o) for m in local for o in other)
        received = sorted((others[o][0], o, m) for m in local for o in other)
        self._sent = torch.tensor([(m, o) for _, m, o in sent], dtype=torch.int64).view(-1, 2).t()
        pairs = [(m, o) for _, o, m in received]
        self._received = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t()

    def _exchange_bytes(
        self, outgoing: Tensor, incoming: Tensor, sent: list[int] | None, received: list[int] | None
    ) -> None:
        given, found = certain(lambda: (_as_bytes(outgoing), _as_bytes(incoming)))
        sizes = certain(lambda: self._sizes(given, sent, received))
        self._exchange(given, found, sizes)

    def _sizes(
        self, outgoing: Tensor, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        if sent is None or received is None:
            size = len(outgoing) // self.world_size
            return torch.full((2, self.world_size), size)
        return torch.tensor([sent, received])

    def _exchange(self, outgoing: Tensor, incoming: Tensor, sizes: Tensor) -> None:
        """``sizes`` are the bytes to and from each rank."""
        host, others = self._host, self._others
        begins = certain(lambda: sizes.cumsum(1) - sizes)
        away, direct = certain(lambda: (sizes[:, others].sum(1).tolist(), sizes[:, host].tolist()))
        members = self._sizes_of_members(sizes)
        totals = certain(lambda: members.sum(2).tolist()) or [[0, 0]] * len(host)

        def pack() -> Tensor:
            # What stays on this host goes to its rank, all else to the first one.
            order = torch.tensor([host[0], *others.tolist(), *host[1:]])
            return _gather(outgoing, begins[0, order], sizes[0, order])

        to_host = [direct[0][0] + away[0], *direct[0][1:]]
        from_host = [size + sent for size, (sent, _) in zip(direct[1], totals, strict=True)]
        found = self._all_to_all(self._local, certain(pack), to_host, from_host)

        def unpack() -> Tensor:
            given = torch.tensor(from_host)
            starts = given.cumsum(0) - given
            _copy(found, incoming, starts, begins[1, host], sizes[1, host])
            return starts + sizes[1, host]  # where messages to other hosts begin

        starts = certain(unpack)
        if not len(others):
            return
        down = torch.empty(0, dtype=torch.uint8)
        if self._is_leader:
            down = self._exchange_with_hosts(found, starts, members)
        to_members = [received for _, received in totals]
        from_leader = [away[1], *[0] * (len(host) - 1)]
        of_others = self._all_to_all(self._local, down, to_members, from_leader)

        def unpack_others() -> None:
            received = sizes[1, others]
            starts = received.cumsum(0) - received
            _copy(of_others, incoming, starts, begins[1, others], received)

        certain(unpack_others)

    def _sizes_of_members(self, sizes: Tensor) -> Tensor:
        """The first rank learns what those of its host send to others and get; others nothing."""
        num_ranks, width = len(self._host), sizes.nbytes
        to_leader = [width, *[0] * (num_ranks - 1)]
        at_leader = [width * self._is_leader] * num_ranks
        found = self._all_to_all(self._local, _as_bytes(sizes), to_leader, at_leader)
        members = certain(lambda: found.view(torch.int64).view(-1, 2, self.world_size))
        return certain(lambda: members[:, :, self._others])

    def _exchange_with_hosts(self, given: Tensor, starts: Tensor, members: Tensor) -> Tensor:
        """Exchange the messages of this host, and return those to its ranks, one after another.

        ``starts`` are where those of each rank begin, ``members`` their bytes to and from others.
        """
        sent, received = members.unbind(1)

        def pack() -> Tensor:
            order = self._sent.unbind()
            begins = starts.unsqueeze(1) + sent.cumsum(1) - sent
            return _gather(given, begins[order], sent[order])

        sizes = certain(lambda: [self._by_host(each.sum(0)) for each in (sent, received)])
        found = self._all_to_all(self._leaders, certain(pack), *sizes)

        def sort_by_receiver() -> Tensor:
            order = self._received.unbind()
            in_order = received[order]
            begins = torch.empty_like(received)
            begins.index_put_(order, in_order.cumsum(0) - in_order)
            return _gather(found, begins.flatten(), received.flatten())

        return certain(sort_by_receiver)

    def _by_host(self, sizes: Tensor) -> list[int]:
        totals = torch.zeros(self._num_hosts, dtype=torch.int64)
        found: list[int] = totals.index_add_(0, self._host_of_other, sizes).tolist()
        return found

    @staticmethod
    def _all_to_all(
        group: ProcessGroup, given: Tensor, sizes: list[int], incoming: list[int]
    ) -> Tensor:
        found = certain(lambda: torch.empty(sum(incoming), dtype=torch.uint8))
        dist.all_to_all_single(found, given, incoming, sizes, group=group)
        return found


def host_name() -> str:
    """The host as torchrun numbers it, or its name."""
    return os.environ.get("GROUP_RANK", "") + "@" + socket.gethostname()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _gather(buffer: Tensor, begins: Tensor, sizes: Tensor) -> Tensor:
    """Pieces of a buffer, one after another."""
    ends = sizes.cumsum(0)
    found = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8)
    _copy(buffer, found, begins, ends - sizes, sizes)
    return found


def _copy(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor, sizes: Tensor) -> None:
    assert ext is not None
    pieces = (each.contiguous() for each in (sources, targets, sizes))
    ext.copy_pieces(source, target, *pieces)


# Before ranks connect


def warn_about_loopback() -> None:
    """Warn if gloo will bind this host's loopback address, where other hosts cannot reach it.

    Gloo binds the address of the host's name, and without one the loopback. Ranks on other hosts
    are then refused, or wait until the timeout, in ``init_process_group``.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or not _has_other_hosts() or not _binds_loopback():
        return
    found = [name for _, name in socket.if_nameindex() if not name.startswith("lo")]
    warnings.warn(
        f"sparsestep: the name of this host, {socket.gethostname()!r}, has no address that other "
        "hosts can reach, so gloo would connect to the loopback. Set GLOO_SOCKET_IFNAME to the "
        f"network interface of this host: {', '.join(found) or 'there is none'}.",
        RuntimeWarning,
        stacklevel=2,
    )


def _has_other_hosts() -> bool:
    """Whether torchrun, or another launcher with its variables, starts ranks on other hosts."""
    world, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world.isdecimal() and local.isdecimal() and int(world) > int(local)


def _binds_loopback() -> bool:
    """Whether the first address of the host's name that can be bound is a loopback address."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # gloo falls back to it
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as bound:
            try:
                bound.bind(address)
            except OSError:
                continue
        host = str(address[0]).partition("%")[0]
        return ipaddress.ip_address(host).is_loopback
    return True
