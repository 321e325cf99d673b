"""Gradients of every layout, and the one form that they become: ``touched.IndexedGrad``.

``layouts`` and ``compressed`` turn a gradient into it, ``masks`` makes it smaller, ``merge`` sums
duplicates. ``compact`` is an embedding's gradient as it comes; the other ``compact_*`` modules are
how torch sees it. ``norms`` and ``clip`` are for clipping. May import ``memory`` and what is below.
"""
