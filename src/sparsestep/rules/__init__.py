"""Rules: update formulas and their options, independent of optimizers and engines.

``rule`` has the formula and its state, ``idle`` its update without a gradient, ``trace`` the
formula as a program, ``int8`` its state in 8 bits, and ``options`` the options of all optimizers.
"""
