"""Recipes in training loops of other libraries: Lightning, Transformers' Trainer and Accelerate.

Each library has its own module; this package imports none of them.
"""
