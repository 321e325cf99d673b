"""Dense semantics at sparse cost: a row catches up with missed steps when it is next needed.

``rows`` has the step that each row has reached, ``history`` the steps since, and ``tracking``
notices reads. May import ``engines`` and what lies below; optimizers are passed in.
"""
