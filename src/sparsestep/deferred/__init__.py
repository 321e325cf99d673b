"""Dense semantics at sparse cost: a row catches up with missed steps when it is next needed.

``clock`` knows the step that each row has reached, ``history`` what the steps since did,
``reference`` and ``kernel`` catch up; ``tracking``, ``guard`` and ``watching`` see reads. May
import ``engines`` and what lies below; optimizers are passed in.
"""
