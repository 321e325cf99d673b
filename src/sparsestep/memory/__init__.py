"""Memory: of parameters, of state, and of tensors in files.

``parameters`` says which memory a parameter has and refuses what cannot be written in place;
``pages`` makes state that costs nothing until it is touched; ``huge_pages`` moves what is used
much. May import ``core`` and ``errors``.
"""
