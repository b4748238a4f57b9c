"""Engines that run for long, in several threads and processes, or on a cache that is not as they left it."""

from __future__ import annotations

import copy
import gc
import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from llvmlite import binding as llvm
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.runtime import _compiler
from tests.runtime.models import Residual, pruned

_PAGES = Path("/proc/self/statm")


def _resident() -> int:
    return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _small() -> nn.Module:
    return pruned(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Tanh()), 0.5)


@pytest.mark.skipif(not _PAGES.exists(), reason="reads resident memory from /proc")
@pytest.mark.parametrize("threads", [1, 2])
def test_ten_thousand_calls_do_not_grow_resident_memory(threads: int) -> None:
    engine = runtime.compile(_small(), torch.randn(2, 2, 9, 9), threads=threads, tuned=False)
    inputs = [torch.randn(batch, 2, 9, 9) for batch in (1, 3, 2)]

    def call(count: int) -> None:
        for number in range(count):
            engine(inputs[number % 3])

    def growth(count: int) -> int:
        before = _resident()
        call(count)
        return _resident() - before

    call(500)
    assert min(growth(5_000), growth(5_000)) < 1 << 20  # a helper thread may start in one of them, a leak is in both
    assert len(engine._arenas) == 1


def test_an_engine_remembers_the_sizes_that_it_used_last() -> None:
    model = pruned(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 4)))
    engine = runtime.compile(model, torch.randn(2, 5, 12), threads=1, tuned=False)
    inputs = [torch.randn(1, length, 12) for length in range(1, 101)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
    for _ in range(2):
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(engine(x), y, rtol=1e-4, atol=1e-5)
    assert len(engine._bindings) == 64
    assert {sizes for key in engine._bindings for name, sizes in key[1:]} >= set(range(40, 101))


def test_engines_in_several_threads_at_once_do_not_disturb_each_other() -> None:
    models = [_small(), pruned(Residual()), pruned(nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 5)))]
    inputs = [torch.randn(3, 2, 9, 9), torch.randn(2, 3, 17, 19), torch.randn(5, 40)]

    def work(number: int) -> bool:
        """Compile, bind and run while other threads do the same."""
        model, x = models[number % 3], inputs[number % 3]
        engine = runtime.compile(model, x, threads=2, tuned=False) if number < 6 else shared[number % 3]
        found = [engine(x) for _ in range(10)]
        return all(torch.equal(one, found[0]) for one in found) and torch.allclose(
            found[0], expected[number % 3], atol=1e-4
        )

    shared = [runtime.compile(model, x, threads=2, tuned=False) for model, x in zip(models, inputs, strict=True)]
    with torch.no_grad():
        expected = [model(x) for model, x in zip(models, inputs, strict=True)]
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(18)))


def _run_pickled(content: bytes, x: Tensor, results: object) -> None:
    """In a new process."""
    torch.set_num_threads(1)
    results.put(pickle.loads(content)(x).tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_pickled_engine_runs_in_another_process(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this system")
    x = torch.randn(2, 2, 9, 9)
    engine = runtime.compile(_small(), x, threads=2, tuned=False)
    expected = engine(x)  # helper threads run, which a forked process does not have
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    process = context.Process(target=_run_pickled, args=(pickle.dumps(engine), x, results))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(results.get()), expected)


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


def _run(cache: Path, program: str = PROGRAM) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "XDG_CACHE_HOME": str(cache)})


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs file owners")
def test_a_cache_of_another_user_is_neither_read_nor_written(tmp_path: Path) -> None:
    _run(tmp_path)
    folder = tmp_path / "gossamer" / "kernels"
    for path in folder.iterdir():
        path.write_bytes(b"code of someone else")
    before = _contents(folder)
    _run(tmp_path, PROGRAM.replace("import torch\n", "import os, torch\nos.getuid = lambda: 12345\n", 1))
    assert _contents(folder) == before


def test_a_cpu_that_is_named_after_the_first_kernel_changes_nothing(tmp_path: Path) -> None:
    again = PROGRAM.split("torch.manual_seed", 1)[1].replace("nn.Conv2d(3, 8, 3, 2, 1)", "nn.Conv2d(3, 8, 5, 2, 1)")
    _run(tmp_path, f"{PROGRAM}\nimport os\nos.environ['GOSSAMER_CPU'] = 'haswell'\ntorch.manual_seed{again}")


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs file modes")
def test_kernels_are_compiled_without_a_cache_that_is_read_only(tmp_path: Path) -> None:
    _run(tmp_path)
    folder = tmp_path / "gossamer" / "kernels"
    before, removed = _contents(folder), min(folder.iterdir())
    removed.unlink()
    folder.chmod(0o500)
    # A superuser may write anywhere: the program then stands for a user who may not.
    program = PROGRAM.replace("import torch\n", "import os, torch\nos.access = lambda path, mode: mode != os.W_OK\n", 1)
    try:
        _run(tmp_path, program)
    finally:
        folder.chmod(0o700)
    assert _contents(folder) == {name: code for name, code in before.items() if name != removed.name}


@pytest.fixture
def other_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], bytes]:
    """Object code of a small module as the compiler keeps it for a CPU with these features."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = (
        "define float @run(float %a, float %b, float %c) { %d = fmul float %a, %b %e = fadd float %d, %c ret float %e }"
    )
    text = f'target triple = "{llvm.get_default_triple()}"\n{text}'
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()

    def kernel() -> str:
        return text

    def compiled(features: str) -> bytes:
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu="x86-64", features=features, opt=3, jit=True
        )
        monkeypatch.setattr(_compiler, "_processor", lambda: ("x86-64", features))
        monkeypatch.setattr(_compiler, "_machine", lambda: machine)
        return _compiler._object_code(kernel, ())

    return compiled


@pytest.mark.skipif(llvm.get_default_triple().split("-")[0] != "x86_64", reason="for x86")
def test_code_for_a_cpu_with_other_features_is_compiled_again(
    other_processor: Callable[[str], bytes], tmp_path: Path
) -> None:
    wide = other_processor("+avx512f")
    assert other_processor("+sse2") != wide  # not what the cache holds for the other CPU
    assert len(_contents(tmp_path / "gossamer" / "kernels")) == 2
    assert other_processor("+avx512f") == wide


@pytest.mark.skipif(llvm.get_default_triple().split("-")[0] != "x86_64", reason="for x86")
def test_code_copied_under_the_name_of_another_kernel_is_not_run(
    other_processor: Callable[[str], bytes], tmp_path: Path
) -> None:
    """A cache on a network drive, or one that someone mixed up: the file belongs to another CPU than its name says."""
    wide, folder = other_processor("+avx512f"), tmp_path / "gossamer" / "kernels"
    (own,) = folder.iterdir()
    content = own.read_bytes()
    narrow = other_processor("+sse2")
    (other,) = [path for path in folder.iterdir() if path != own]
    other.write_bytes(content)
    assert other_processor("+sse2") == narrow != wide
    assert hashlib.sha256(other.read_bytes()).digest() != hashlib.sha256(content).digest()


X = torch.randn(3, 3, 17, 19)


@pytest.fixture(scope="module")
def residual() -> runtime.Engine:
    return runtime.compile(pruned(Residual()), X, threads=1, tuned=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.stack([x, x], 1)[:, 1],
        lambda x: x.repeat(2, 1, 1, 1)[::2],
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: x.clone().requires_grad_(),
        nn.Parameter,
    ],
    ids=["channels last", "transposed", "slices", "every second", "expanded", "requires grad", "parameter"],
)
def test_tensors_with_any_strides_are_read_right(residual: runtime.Engine, change: Callable[[Tensor], Tensor]) -> None:
    x = change(X)
    found = residual(x)
    assert torch.equal(found, residual(x.detach().contiguous().clone()))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (X.double(), "found torch.float64"),
        (X.half(), "found torch.float16"),
        (X.bfloat16(), "found torch.bfloat16"),
        (X.to("meta"), "on meta"),
        (X.to_sparse(), "found torch.sparse_coo of torch.float32"),
        (X[:0], r"found torch.float32 \(0, 3, 17, 19\)"),
        (X.numpy(), "found ndarray"),
        (None, "found NoneType"),
    ],
    ids=["float64", "float16", "bfloat16", "another device", "sparse", "an empty batch", "numpy", "None"],
)
def test_an_input_of_another_kind_is_one_error(residual: runtime.Engine, x: object, found: str) -> None:
    with pytest.raises(GossamerError, match=found) as raised:
        residual(x)
    assert "\n" not in str(raised.value)
    assert residual(X).shape == (3, 10)  # and the engine still runs


class Mixed(nn.Module):
    """Kernels, and a layer that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.line = nn.Conv2d(3, 8, 3), nn.Conv1d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.first(x).relu().mean(2))


def test_contexts_of_torch_do_not_change_results() -> None:
    engine = runtime.compile(pruned(Mixed(), 0.5), X, threads=1, tuned=False)
    expected = engine(X)
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
    ):
        with context:
            found = engine(X)
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


def test_nan_in_one_image_stays_there_and_is_gone_in_the_next_call(residual: runtime.Engine) -> None:
    expected = residual(X)
    for value in (float("nan"), float("inf"), -float("inf")):
        x = X.clone()
        x[1] = value
        found = residual(x)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
        assert not found[1].isfinite().all()
    assert torch.equal(residual(X), expected)


def test_an_error_of_torch_in_a_call_names_the_operator_and_the_engine_still_runs() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    engine = runtime.compile(model, torch.zeros(2, 5, dtype=torch.long), threads=1, tuned=False)
    with pytest.raises(GossamerError, match=r"torch cannot compute aten\.embedding\.default: IndexError"):
        engine(torch.full((2, 5), 10))
    assert engine(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 4)


def test_a_copy_of_an_engine_is_independent_of_it() -> None:
    engine = runtime.compile(_small(), torch.randn(2, 2, 9, 9), threads=1, tuned=False)
    x = torch.randn(2, 2, 9, 9)
    expected = engine(x)  # its weights are those of the kernels from now on
    other = copy.deepcopy(engine)
    del engine
    gc.collect()
    assert torch.equal(other(x), expected)
    assert torch.equal(other(x[:1]), expected[:1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_engine_runs_in_a_forked_process_after_use(threads: int) -> None:
    program = f"""
import os, sys, torch
from torch import nn
from gossamer import runtime
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Tanh())
x = torch.randn(4, 3, 30, 30)
engine = runtime.compile(model, x, threads={threads}, tuned=False)
expected = engine(x)
child = os.fork()
same = all(torch.equal(engine(x), expected) for _ in range(20))
if child == 0:
    os._exit(0 if same else 3)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.skipif(not _PAGES.exists(), reason="reads resident memory from /proc")
def test_engines_that_nobody_holds_give_their_memory_back() -> None:
    x = torch.randn(1, 1000)
    model = pruned(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)), 0.5)  # 4 MB of values and more

    def one() -> Callable[[], object]:
        engine = runtime.compile(model, x, threads=2, tuned=False)
        engine(x)
        return weakref.ref(engine)

    for _ in range(3):
        one()
    gc.collect()
    before = _resident()
    references = [one() for _ in range(8)]
    gc.collect()
    assert all(reference() is None for reference in references)
    assert _resident() - before < 24 << 20
