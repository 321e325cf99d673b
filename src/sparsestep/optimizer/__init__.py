"""Everything that is common to all optimizers: ``base.RuleOptimizer``.

``declaration`` is what a class says about itself, ``records`` the state of its parameters,
``groups`` reads param groups, ``plan`` does a step. May import ``dense``, ``engines`` and what lies
below; no rule.
"""
