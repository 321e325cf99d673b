from __future__ import annotations

import re

import pytest

from tests.integrations.running import example, in_the_gallery, needs, run

pytestmark = needs("pykeen")


def test_the_losses_are_those_of_dense_gradients():
    printed = example("knowledge_graph.py")
    found = re.findall(r"loss (\S+) with dense gradients, (\S+) fused", printed)
    assert len(found) == 5
    for dense, fused in found:
        assert float(fused) == pytest.approx(float(dense), rel=1e-4)
    assert in_the_gallery("knowledge_graph", printed)


ANEW = """
import warnings, sparsestep, knowledge_graph
from pykeen.training import SLCWATrainingLoop
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always", sparsestep.StaleWarning)
    known = knowledge_graph.triples()
    model = knowledge_graph.ComplEx(triples_factory=known, embedding_dim=4)
    optimizer = sparsestep.nn.optimizer_for(model, sparsestep.Adam)
    loop = SLCWATrainingLoop(model=model, triples_factory=known, optimizer=optimizer)
    loop.train(known, num_epochs=1, batch_size=256, use_tqdm=False)
print([str(each.message) for each in said if each.category is sparsestep.StaleWarning])
"""


def test_an_optimizer_that_pykeen_makes_anew_says_what_it_has_lost():
    assert "Adam has semantics='masked'" in run("-c", ANEW)


CONSTRAINED = """
import sparsestep, knowledge_graph
from pykeen.models import TransE
knowledge_graph.ComplEx = TransE  # it normalises all rows after each step

def guarded(model):
    optimizer = sparsestep.nn.optimizer_for(model, sparsestep.Adam, lr=0.01)
    optimizer.track(model, guard=True)
    return optimizer

dense = knowledge_graph.train(lambda model: sparsestep.Adam(model.parameters(), lr=0.01))
print(max(abs(a - b) for a, b in zip(dense, knowledge_graph.train(guarded))))
"""


def test_under_the_guard_a_model_may_write_its_tables_after_each_step():
    assert float(run("-c", CONSTRAINED)) < 1e-4
