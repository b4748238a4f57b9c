"""Compiles LLVM modules for the host and keeps the object code on disk."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir


@cache
def _machine(features: str | None) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    flags = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit" if features is None else features
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=flags, opt=3, jit=True)


def compile_object(module: ir.Module, features: str | None = None) -> bytes:
    machine = _machine(features)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = False
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_object(parsed)

def assembly(module, features=None):
    machine = _machine(features)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_assembly(parsed)

_jit = None
_keep = []
def load_object(code: bytes, name: str) -> int:
    global _jit
    _machine(None)
    if _jit is None:
        _jit = llvm.create_lljit_compiler(llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), opt=3, jit=True), use_jit_link=False)
    lib = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(name).link(_jit, f"lib{len(_keep)}")
    _keep.append(lib)
    return lib[name]


_addresses: dict[str, int] = {}

def function_address(module: ir.Module) -> int:
    """The address of the module's function `run`, compiled once per process and kept on disk."""
    text = str(module)
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _addresses:
        _addresses[key] = load_object(compile_object(module), "run")
    return _addresses[key]
