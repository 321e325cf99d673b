from __future__ import annotations

import re

from tests.integrations.running import example, in_the_gallery, needs, run

pytestmark = needs("lightning")

# What a module with dense semantics arrives at: at once, and resumed after one epoch.
TRACKED = """
import tempfile, torch, sparsestep, with_lightning
from pathlib import Path

class Tracked(with_lightning.Recommender):
    def configure_optimizers(self):
        optimizer = sparsestep.AdamW(self.parameters(), lr=0.02, semantics="dense")
        optimizer.track(self)
        return optimizer

with_lightning.Recommender = Tracked
folder = Path(tempfile.mkdtemp())
options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
whole = with_lightning.train(3, folder, **options)
with_lightning.train(1, folder, **options)
resumed = with_lightning.train(3, folder, resume=folder / "last.ckpt", **options)
torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=1e-4)
"""


def test_the_example_runs_and_goes_on_from_a_checkpoint_with_the_same_weights():
    printed = example("with_lightning.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 6
    assert max(losses) < 0.69  # tossing a coin
    assert printed.endswith("the weights are the same: True\n")
    assert in_the_gallery("with_lightning", printed)


def test_a_module_with_dense_semantics_is_resumed_where_it_was():
    run("-c", TRACKED)
