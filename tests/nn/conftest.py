"""What tests of embeddings share."""

from __future__ import annotations

import pytest

from sparsestep.nn.vocabulary import id_table as native_ids


@pytest.fixture(params=["core", "python"])
def ids_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """With the core, and as it is where that is not installed."""
    if request.param == "core":
        if native_ids.ext is None:
            pytest.skip("the core is not installed")
    else:
        monkeypatch.setattr(native_ids, "ext", None)
