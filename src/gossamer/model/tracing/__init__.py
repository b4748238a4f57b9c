"""Analyses of a model's graph: which channels are coupled, and which layers are first and last.

`tracer.py` runs a model and reports every operator and module call to an `Observer`. The observers are in `coupling.py`
(which channels are the same), `ends.py` (first and last layers), `../counting.py` (MACs) and `../thin/comparison.py`
(products with weights, to compare two versions of a model).

To find coupled channels, `coupling.py` passes each operator to its rule in `rules.py`; rules state facts in the terms
of `channels.py`, whose docstring has a glossary and an example. `filter_groups.py` turns the result into groups of
filters.
"""
