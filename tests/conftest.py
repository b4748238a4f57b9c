"""Settings for all tests: properties are tried without a clock, and in the same way on every machine."""

from __future__ import annotations

import os
import tempfile

import torch
from hypothesis import settings

settings.register_profile("gossamer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gossamer")
torch.use_deterministic_algorithms(True)

# What runs remember of themselves goes here, in this process and those that it starts, and not to the user's home.
_STATE = tempfile.TemporaryDirectory(prefix="gossamer-state-")
os.environ["GOSSAMER_STATE_DIR"] = _STATE.name
