"""Leaves out of collection the module that nothing may import."""

collect_ignore = ["canary.py"]
