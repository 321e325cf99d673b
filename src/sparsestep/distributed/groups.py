"""Process groups of our own, which wait no longer than the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from sparsestep._torch import group_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def new_group_like(parent: ProcessGroup | None, backend: str | None = None) -> ProcessGroup:
    """Create a process group with the ranks and the timeout of another one.

    Collectives in the new group do not wait for those in the parent. All ranks of the parent call
    this function; other ranks do not take part.

    Args:
        parent: the other group; ``None`` for the default group.
        backend: the backend of the new group; by default the one of the default group.

    Returns:
        The new group.
    """
    timeout = group_timeout(dist.group.WORLD if parent is None else parent)
    made: ProcessGroup
    if parent is None or parent is dist.group.WORLD:
        made = dist.new_group(timeout=timeout, backend=backend)
    else:
        made = dist.new_group(
            dist.get_process_group_ranks(parent),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
        )
    return made
