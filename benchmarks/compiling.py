"""How long `gossamer.runtime.compile` takes in a new process, and how much memory an engine's weights take.

The first time nothing is known; the second time kernels and measurements come from the user's cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

from benchmarks.measuring import Row, Watch

_LIMITS = {"the first time": 20.0, "again": 2.0}
"""Seconds."""
_MEMORY = 0.3
_PROGRAM = """
import json, time, torch, torchvision
from benchmarks.runtime import with_zeros
from gossamer import runtime
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = with_zeros(torchvision.models.resnet50().eval(), 0.9), torch.randn(1, 3, 224, 224)
start = time.perf_counter()
engine = runtime.compile(model, x, threads=1)
seconds = time.perf_counter() - start
engine(x)
dense = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps([seconds, engine.weight_bytes, dense]))
"""


def compiling(watch: Watch) -> Iterator[Row]:
    """A ResNet-50 with 90 % zeros."""
    held, dense = 0, 1
    with TemporaryDirectory() as cache:
        for _, (name, limit) in zip(watch("compiling a ResNet-50", len(_LIMITS)), _LIMITS.items(), strict=True):
            environment = {**os.environ, "XDG_CACHE_HOME": cache}
            done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, check=True)
            seconds, held, dense = json.loads(done.stdout.splitlines()[-1])
            yield Row(f"compile ResNet-50 with 90 % zeros {name} / limit", seconds, limit, "s", 1.0)
    yield Row("weights of ResNet-50 with 90 % zeros / dense", held / 1e6, dense / 1e6, "MB", _MEMORY)
