"""Plots as PNG, SVG or HTML: timelines, layers, sensitivities, permutations."""
