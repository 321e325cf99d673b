"""A check before processes on several hosts connect."""

from __future__ import annotations

import ipaddress
import os
import socket
import warnings


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
