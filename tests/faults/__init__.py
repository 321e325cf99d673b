"""Fault injection: every public operation happens as a whole or not at all.

``make faults`` runs each operation of ``operations.py`` with one fault at a time, in a forked
process: an allocation fails, a signal arrives at a line of Python or at a random moment, or the
process is killed. Afterward every tensor, counter and file has to be as before the operation or as
after it, and calling the operation again has to give the result of an undisturbed run. Two
outcomes are counted apart: a library below torch has ended the process, or hosts differ as limit 5
of docs/promises.md says.

``operations.py`` and ``ranks.py`` have the operations, ``injectors.py`` the faults, ``harness.py``
one round of both, ``allocations.py`` the preloaded allocator that fails.
"""
