"""Refuses subinterpreters with an ``ImportError``.

Importing torch in a subinterpreter hangs, raises ``SystemError`` or crashes the process, so the
package imports this module first, and this module imports nothing.
"""

import sys


def _is_main() -> bool:
    try:
        if sys.version_info >= (3, 13):
            import _interpreters as interpreters
        else:
            import _xxsubinterpreters as interpreters
    except ImportError:  # a Python without subinterpreters
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


if not _is_main():
    raise ImportError(
        "sparsestep must be imported in the main interpreter, got a subinterpreter, where neither "
        "torch nor the native core can be loaded. Use a process instead.",
        name="sparsestep",
    )
