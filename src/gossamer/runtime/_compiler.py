"""Compiles kernels for the host's CPU and keeps their object code on disk.

Without a folder of the user's own, kernels are compiled in every process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir

from gossamer.runtime._cache import cache_folder, read_cached, write_cached
from gossamer.version import __version__

ENTRY = "run"
"""The name of every kernel's function."""
_lock = threading.Lock()
_libraries: list[Any] = []
"""Loaded code; freed with the process."""
_addresses: dict[tuple[object, ...], int] = {}


def kernel_address(build: Callable[..., ir.Module], *arguments: object) -> int:
    """The address of the kernel that `build(*arguments)` describes, compiled at most once per process."""
    key = (build, *arguments)
    with _lock:
        if key not in _addresses:
            _addresses[key] = _load(_object_code(build, arguments))
        return _addresses[key]


def _object_code(build: Callable[..., ir.Module], arguments: tuple[object, ...]) -> bytes:
    """Object code by what it depends on: the CPU, the package's source, and the arguments."""
    what = f"{processor()} {_source()} {build.__module__}.{build.__qualname__} {arguments!r}"
    name = hashlib.sha256(what.encode()).hexdigest()
    folder = cache_folder("kernels")
    code = None if folder is None else read_cached(folder / name)
    if code is None:
        code = compile_text(str(build(*arguments)), _machine())
        if folder is not None:
            write_cached(folder / name, code)
    return code


@cache
def _source() -> str:
    """A digest of all that writes kernels; they are not written only to find their object code."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def processor() -> str:
    """What object code depends on: the compiler's version, the CPU and its features."""
    return f"{llvmlite.__version__} {_machine().triple} {' '.join(_processor())}"


def compile_text(text: str, machine: Any) -> bytes:
    """Object code of a module in LLVM's assembly language."""
    return machine.emit_object(optimized(text, machine))


def optimized(text: str, machine: Any) -> Any:
    """The module after LLVM's optimizations; loops are already as wide and as unrolled as they should be."""
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


@cache
def _processor() -> tuple[str, str]:
    """The CPU to compile for and its features: the host's, or the CPU that `GOSSAMER_CPU` names, such as haswell."""
    given = os.environ.get("GOSSAMER_CPU")
    if given:
        return given, ""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"


def has_vnni() -> bool:
    """Whether the CPU multiplies and adds four pairs of 8-bit integers with one 512-bit instruction."""
    return "+avx512vnni" in _processor()[1].split(",")


def has_expand() -> bool:
    """Whether the CPU has AVX-512's instructions that spread packed values over the lanes of a mask."""
    return "+avx512f" in _processor()[1].split(",")


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return _new_machine()


def _new_machine() -> Any:
    cpu, features = _processor()
    return llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


@cache
def _linker() -> Any:
    linker: Any = llvm.create_lljit_compiler(_new_machine(), use_jit_link=False)
    return linker


def _load(code: bytes) -> int:
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(ENTRY)
    library: Any = builder.link(_linker(), f"gossamer-{len(_libraries)}")
    _libraries.append(library)
    return library[ENTRY]
