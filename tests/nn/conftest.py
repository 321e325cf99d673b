"""What tests of embeddings share."""

from __future__ import annotations

import pytest

from sparsestep.nn import ids


@pytest.fixture(params=["core", "python"])
def ids_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """With the core, and as it is where that is not installed."""
    if request.param == "core":
        if ids.core is None:
            pytest.skip("the core is not installed")
    else:
        monkeypatch.setattr(ids, "core", None)
