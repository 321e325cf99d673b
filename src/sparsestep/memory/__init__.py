"""Where numbers lie.

``parameters`` says which memory a parameter has and refuses what cannot be written in place;
``pages`` makes state that costs nothing until it is touched. May import ``core`` and ``errors``.
"""
