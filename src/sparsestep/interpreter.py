"""Refuses subinterpreters with an ``ImportError``.

Importing torch in a subinterpreter hangs, raises ``SystemError`` or crashes the process, so the
package imports this module first.
"""

import sys
from importlib import import_module


def _is_main() -> bool:
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    try:
        interpreters = import_module(name)
    except ImportError:  # a Python without subinterpreters
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


if not _is_main():
    raise ImportError(
        "sparsestep must be imported in the main interpreter, got a subinterpreter, where neither "
        "torch nor the native core can be loaded. Use a process instead.",
        name="sparsestep",
    )
