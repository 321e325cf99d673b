"""``python -m sparsestep`` is the same as ``sparsestep``."""

import sys

from sparsestep.cli import main

if __name__ == "__main__":
    sys.exit(main())
