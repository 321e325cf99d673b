"""What a rule says about itself, before there is an optimizer or an engine.

``rule`` has the formula, its state and its motion without gradients; ``options`` and ``checks``
what may be set for it. May import ``gradients`` and what lies below.
"""
