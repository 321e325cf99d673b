"""What tests of embeddings share."""

from __future__ import annotations

import pytest

from sparsestep import _native


@pytest.fixture
def needs_extension() -> None:
    """Vocabularies need the extension."""
    if _native.ext is None:
        pytest.skip("the extension is not installed")
