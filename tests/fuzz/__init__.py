"""Random programs on everything that is public, each derived from one number.

A *case* is a short program: an optimizer, parameters, and a few operations on them, valid ones and
garbage. What is checked is the same for all: numbers against a float64 oracle, bits of what was not
touched, bits for any number of threads and any instruction set, that a refusal is one sentence and
changes nothing, and that nothing crashes or hangs.

    make fuzz SECONDS=600                     # or CASES=20000, FIRST=0
    python -m tests.fuzz --seed 4711          # one case, as readable steps

| where | what it is |
| --- | --- |
| `chance.py` | where all randomness of a case comes from |
| `findings.py` | what counts as a finding; what a refusal has to look like |
| `gradients.py`, `compressed.py` | a gradient in every layout, and what it means |
| `tables.py` | parameters and options |
| `oracle.py` | one step in float64 |
| `world.py`, `operations.py` | an optimizer and what may be done with it |
| `spoiling.py`, `garbage.py` | what must be refused, or at least not break anything |
| `kinds/` | a file for each kind of case |
| `cases.py` | seed to case |
| `pool.py`, `screen.py`, `__main__.py` | processes that survive a crash, and the command |
"""
