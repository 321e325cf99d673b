"""Importing sparsestep in a subinterpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = '''
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
else:
    import _xxsubinterpreters as interpreters

{before}
interpreters.run_string(interpreters.create(), """
import sys
try:
    import {module}
except ImportError as error:
    print(error.name, error, sep=": ")
    print("torch" in sys.modules, flush=True)
""")
'''


@pytest.mark.parametrize(
    ("module", "before"), [("sparsestep", ""), ("sparsestep._C", "import sparsestep")]
)
def test_subinterpreters_are_refused_before_torch_is_imported(module: str, before: str):
    """Importing torch in a subinterpreter hangs, raises SystemError or crashes the process."""
    pytest.importorskip("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    script = SCRIPT.format(module=module, before=before)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "sparsestep: sparsestep must be imported in the main interpreter, got a subinterpreter, "
        "where neither torch nor the native core can be loaded. Use a process instead.",
        "False",
    ]
