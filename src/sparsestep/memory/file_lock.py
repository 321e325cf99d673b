"""Advisory locks: one process, with the processes forked from it, writes a table in a file.

The lock is on the open file description (``flock``), so forked processes share it, and it ends when
the last of them has closed the file or died. Other programs can still read the file.
"""

from __future__ import annotations

import errno
import os
from typing import Any

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    fcntl: Any = None
else:
    fcntl = _fcntl

# File systems without locks: files on these are not protected.
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def acquire(descriptor: int) -> bool:
    """Lock an open file; ``False`` if another open file description holds the lock."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def holder(descriptor: int) -> str:
    """Describe the process that holds the lock of a file, as far as the system tells."""
    about = os.fstat(descriptor)
    device = os.major(about.st_dev), os.minor(about.st_dev), about.st_ino
    try:
        with open("/proc/locks") as locks:
            fields = [line.split() for line in locks]
    except OSError:
        return "another process"
    for _, kind, *_, pid, file, _, _ in (each for each in fields if len(each) == 8):
        major, minor, inode = file.split(":")
        if kind == "FLOCK" and (int(major, 16), int(minor, 16), int(inode)) == device:
            is_gone = int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")
            return f"a process forked from process {pid}" if is_gone else f"process {pid}"
    return "another process"
