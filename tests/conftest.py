"""Settings for all tests: properties are tried without a clock, and in the same way on every machine."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("gossamer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gossamer")
torch.use_deterministic_algorithms(True)
