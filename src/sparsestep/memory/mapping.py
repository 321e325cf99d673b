"""Mapping a file over memory that is mapped already.

A load replaces the file of a table. The tensors of that table keep their address, so the new file
is mapped there in place of the old one, in a single system call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys

# On Windows, a mapped file can be neither replaced nor renamed.
CAN_REMAP = sys.platform != "win32"

_MAP_FIXED = 0x10  # the same on Linux and macOS


def map_file(address: int, size: int, descriptor: int) -> None:
    """Map a file, shared and writable, in place of what is mapped at an address.

    Args:
        address: the first byte of an existing mapping of at least ``size`` bytes.
        size: how many bytes to map.
        descriptor: of the file.
    """
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    found = _libc().mmap(address, size, prot, flags, descriptor, 0)
    if found != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, word, number, number, number, ctypes.c_ssize_t)
    return libc
