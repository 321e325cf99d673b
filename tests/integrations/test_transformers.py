from __future__ import annotations

from tests.integrations.running import example, in_the_gallery, needs

pytestmark = needs("transformers", "accelerate")


def test_the_trainer_trains_new_rows_and_nothing_else():
    printed = example("new_tokens.py")
    assert "weights that changed: ['transformer.wte.weight', 'lm_head.weight']\n" in printed
    assert f"rows that changed: {list(range(1_000, 1_010))}\n" in printed
    assert in_the_gallery("new_tokens", printed)
