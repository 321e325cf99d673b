"""Gradients of every layout, and the one form that they become: ``indexed.IndexedGrad``.

``layouts`` converts a gradient to it, ``masks`` selects a part of it, ``dedup`` sums duplicates.
``compact`` is the gradient of our embeddings, ``clip`` clips gradients of all layouts, ``exchange``
moves those of sharded tables between ranks.
"""
