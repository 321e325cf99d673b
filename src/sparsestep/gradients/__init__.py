"""Gradients of every layout, and the one form that they become: ``touched.Touched``.

``layouts`` turns a gradient into it and ``masks`` makes it smaller; ``compact`` is an embedding's
gradient as it comes, ``compact_tensor`` and ``compact_clip`` how torch sees it; ``merge`` sums
duplicates; ``norms`` and ``clip`` are for clipping. May import ``memory``, ``core`` and ``errors``.
"""
