"""Random programs on everything that is public, each derived from one number.

A *case* is a short program: an optimizer, parameters, and a few operations on them, valid ones and
garbage. What is checked is the same for all: numbers against a float64 oracle, bits of what was not
touched, bits for any number of threads and any instruction set, that a refusal is one sentence and
changes nothing, and that nothing crashes or hangs.

    make fuzz SECONDS=600                     # or CASES=20000, FIRST=0
    python -m tests.fuzz --seed 4711          # one case, as readable steps

Parameters, gradients and garbage come from `tests/generate`, the numbers of a step from
`tests/oracle.py`.

| where | what it is |
| --- | --- |
| `findings.py` | what a refusal has to look like |
| `world.py`, `operations.py` | an optimizer and what may be done with it |
| `spoiling.py` | what must be refused, or at least not break anything |
| `kinds/` | a file for each kind of case |
| `cases.py` | seed to case |
| `pool.py`, `__main__.py` | processes that survive a crash, and the command |
"""
