"""What a rule says about itself, before there is an optimizer or an engine.

``rule`` has the formula and its state, ``motion`` what it does without a gradient, ``options`` and
``checks`` what may be set for it. May import ``gradients`` and what lies below.
"""
