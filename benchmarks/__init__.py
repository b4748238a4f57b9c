"""What Gossamer costs, measured against what PyTorch costs in the same run.

`python -m benchmarks` runs the short ones, `--all` every one. Each module
here is one benchmark: a function that yields rows.
"""
