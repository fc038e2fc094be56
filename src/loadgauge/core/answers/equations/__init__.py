"""Closed forms: the list of operations read with SymPy symbols. This package can be called.

    loadgauge.equation("activations", layer="gpt", tp="t")

`help(loadgauge.core.answers.equations.equation.equation)` describes every argument.
"""
