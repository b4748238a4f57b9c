"""Compiles kernels for the host's CPU and keeps their object code on disk.

Object code is executable, so the cache is used only if its folder and files belong to the user and nobody else can
write them; each file has a digest in front. Without such a folder kernels are compiled in every process.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir

from gossamer.io import atomic_write

ENTRY = "run"
"""The name of every kernel's function."""
_DIGEST = hashlib.sha256().digest_size
_lock = threading.Lock()
_libraries: list[Any] = []
"""Loaded code; freed with the process."""
_addresses: dict[tuple[object, ...], int] = {}


def kernel_address(build: Callable[..., ir.Module], *arguments: object) -> int:
    """The address of the kernel that `build(*arguments)` describes, compiled at most once per process."""
    key = (build, *arguments)
    with _lock:
        if key not in _addresses:
            _addresses[key] = _load(_object_code(str(build(*arguments))))
        return _addresses[key]


def _object_code(text: str) -> bytes:
    machine = _machine()
    processor = f"{llvmlite.__version__} {machine.triple} {' '.join(_processor())}"
    name = hashlib.sha256(f"{processor}\n{text}".encode()).hexdigest()
    folder = _cache_folder()
    code = None if folder is None else _read(folder / name)
    if code is None:
        code = compile_text(text, machine)
        if folder is not None:
            with suppress(OSError), atomic_write(folder / name) as path:
                path.write_bytes(_digest(name, code) + code)
    return code


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


def _cache_folder() -> Path | None:
    """The user's folder for object code; None if it cannot be made, or if others could write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "gossamer" / "kernels"
    with suppress(OSError, RuntimeError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder.lstat(), stat.S_ISDIR) and os.access(folder, os.W_OK) else None
    return None


def _is_private(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    if not is_kind(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _read(path: Path) -> bytes | None:
    """Cached object code; None if there is none, or if it is damaged or not the user's."""
    try:
        if not _is_private(path.lstat(), stat.S_ISREG):
            return None
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_DIGEST:]
    return code if _digest(path.name, code) == content[:_DIGEST] else None


def _digest(name: str, code: bytes) -> bytes:
    """Of a file's name too, which stands for the kernel and the CPU: a copy under another name is not used."""
    return hashlib.sha256(name.encode() + code).digest()
