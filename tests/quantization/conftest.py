"""After every test: no mode of torch is left on, and torch compiles what it is asked to."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import _pop_mode

from tests.quantization.watching import modes, stance


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    left = modes()
    for _ in left:
        _pop_mode()
    compiles = stance() if "torch._dynamo" in sys.modules else "default"
    if compiles != "default":
        torch.compiler.set_stance("default")
    assert left == []
    assert compiles == "default"
