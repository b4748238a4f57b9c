"""Kernels are compiled for the CPU at hand, and their object code is kept in a private folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding as llvm

from gossamer.runtime import _compiler
from gossamer.runtime.kernels.convolution import sparse_convolution
from gossamer.runtime.kernels.tokens import attention

PROGRAM = """
import torch
from torch import nn
from gossamer import runtime

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 6, 3), nn.ReLU()).eval()
x = torch.randn(2, 3, 19, 23)
engine = runtime.compile(model, x, threads=1, tuned=False)
with torch.inference_mode():
    assert (engine(x) - model(x)).abs().max() < 1e-5
"""


def run(cache: Path, **variables: str) -> None:
    subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, env={**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    )


def test_object_code_is_kept_and_damage_to_it_is_noticed(tmp_path: Path) -> None:
    run(tmp_path)
    files = sorted((tmp_path / "gossamer" / "kernels").iterdir())
    assert files
    assert (tmp_path / "gossamer" / "kernels").stat().st_mode & 0o777 == 0o700
    times = [file.stat().st_mtime_ns for file in files]
    run(tmp_path)
    assert [file.stat().st_mtime_ns for file in files] == times
    for file in files:
        file.write_bytes(file.read_bytes()[:-100] + b"\x90" * 100)
    run(tmp_path)
    assert all(file.stat().st_mtime_ns > time for file, time in zip(files, times, strict=True))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs file modes")
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "gossamer" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    run(tmp_path)
    assert not list(folder.iterdir())


def test_a_cache_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "gossamer").write_text("a file where the folder would be")
    run(tmp_path)


@pytest.mark.skipif(llvm.get_default_triple().split("-")[0] != "x86_64", reason="for x86")
def test_results_on_a_cpu_with_avx2_only_are_right(tmp_path: Path) -> None:
    run(tmp_path, GOSSAMER_CPU="haswell")


@pytest.mark.parametrize(
    ("triple", "cpu", "multiply"),
    [("aarch64-linux-gnu", "neoverse-n1", "fmla\tv"), ("x86_64-linux-gnu", "haswell", "vfmadd231ps\t")],
)
def test_kernels_are_vectorized_for_other_cpus(triple: str, cpu: str, multiply: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    for module in (sparse_convolution(16, 2, 1, "relu", True, False, False), attention(2, True)):
        assembly = machine.emit_assembly(_compiler.optimized(str(module), machine))
        assert assembly.count(multiply) >= 8
