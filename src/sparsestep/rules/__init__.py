"""What a rule declares, independent of optimizers and engines.

``rule`` has the formula and its state, ``idle`` its update without a gradient, ``options`` and
``checks`` what may be set for it. May import ``gradients`` and what lies below.
"""
