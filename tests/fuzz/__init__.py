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
| `dense.py` | the same with dense semantics, beside a dense run |
| `spoiling.py` | what must be refused, or at least not break anything |
| `cases.py`, `__main__.py` | seed to case, and the command |

What needs no program of several steps is left to other tests: modules and clipping beside torch's
(`tests/nn`, `tests/grads`), formulas of users (`tests/engines/test_programs.py`), and calls with
one argument that makes no sense (`tests/properties/test_refusals.py`). Those with hypothesis draw
at random, too, with `SPARSESTEP_HYPOTHESIS=fuzz`.
"""
