"""Recipes inside other people's training loops: Lightning, Transformers' Trainer and Accelerate.

Each library has one module here, imported by the user who has that library;
this package itself imports none of them.
"""
