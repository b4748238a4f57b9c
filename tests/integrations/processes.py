"""Forks from a process that has not trained yet: autograd's threads do not survive a fork of one that has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def in_a_new_process(module: str, call: str) -> None:
    """Run `call` with the names of a test module; what goes wrong there is told here."""
    code = f"from pathlib import Path\nimport {module} as tests\nfrom {module} import *\n{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
