"""Dense semantics at sparse cost: what a row missed is done when the row is next needed.

``clock`` knows how far each row is, ``history`` what the steps since have been, ``reference`` and
``kernel`` do what was missed; ``tracking``, ``guard`` and ``watching`` see who reads a row. May
import ``engines`` and what lies below; optimizers are passed in.
"""
