"""Exported files with changed text and tensors and the right digests: refused in one sentence, or read as they are."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer
from gossamer.errors import GossamerError
from gossamer.export import THINNED, read_about, read_integers, save, thin
from gossamer.runner.exporting import Export, read_description, write_subject
from gossamer.runner.subjects import open_subject
from gossamer.sealed import DTYPES
from gossamer.sparse import NM, Unstructured, magnitude
from tests.fuzz.harness import fingerprint, fuzz
from tests.fuzz.sealing import Sealed, seal, unseal
from tests.fuzz.values import hostile, mutated
from tests.quantization.watching import calibrated

NESTED = ("packed", "tied", "quantized", "net", "input")
"""Metadata that is JSON itself."""
ABOUT = {
    "name": "small",
    "task": "classification",
    "net": json.dumps({"type": "squeezenet1_1", "kwargs": {"dropout": 0.5}}),
    "num_classes": "10",
    "input": "[1, 3, 8, 8]",
}
KINDS = ("safetensors", "bitmask", "sparse24", "thin", "int8", "int8-sparse24")


def network(*, tied: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(16, 16)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        first,
        nn.ReLU(),
        first if tied else nn.Linear(16, 16),
        nn.Linear(16, 10),
    ).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@functools.cache
def sound(kind: str) -> Sealed:
    """The parts of a sound file."""
    model = network(tied=kind != "thin")
    with torch.no_grad():
        for layer in (model[0], model[5], model[8]):
            pattern = NM(2, 4) if "sparse24" in kind and layer.weight.shape[1] % 4 == 0 else Unstructured()
            layer.weight *= pattern.mask(magnitude(layer.weight), 0.5 if "sparse24" in kind else 0.8)
        if kind == "thin":
            model[0].weight[:6] = 0
            model[0].bias[:6] = 0
            model[1].weight[:6] = 0
            model[1].bias[:6] = 0
    about = dict(ABOUT)
    if kind == "thin":
        model, found = thin(model, images())
        assert found.removed
        about |= THINNED
    if kind.startswith("int8"):
        calibrated(model, images())
    format = {"thin": "safetensors", "int8": "bitmask", "int8-sparse24": "sparse24"}.get(kind, kind)
    with tempfile.TemporaryDirectory() as folder:
        return unseal(save(model, Path(folder) / "model.safetensors", format, about=about).path)


def as_document(sealed: Sealed) -> dict[str, Any]:
    """The text of a file as one structure, with what is JSON in it taken apart."""
    parsed = {key: json.loads(value) if key in NESTED else value for key, value in sealed.metadata.items()}
    return {"metadata": parsed, "entries": sealed.entries}


def from_document(document: Any, content: bytes) -> Sealed:
    """Parts of a file whose text is whatever is left of the structure."""
    parts = document if isinstance(document, dict) else {}
    metadata, entries = (part if isinstance(part := parts.get(key), dict) else {} for key in ("metadata", "entries"))
    texts = {
        str(key): json.dumps(value) if key in NESTED and not isinstance(value, str) else value
        for key, value in metadata.items()
    }
    return Sealed(texts, {str(key): value for key, value in entries.items()}, content)


@st.composite
def changed_text(draw: st.DrawFn, sealed: Sealed) -> Sealed:
    document = draw(mutated(as_document(sealed), st.one_of(hostile, st.sampled_from([1, 2, 4, 8, 16, "F16", "U64"]))))
    return from_document(document, sealed.content)


@st.composite
def changed_tensors(draw: st.DrawFn, sealed: Sealed) -> Sealed:
    """Other numbers, types, shapes and names of tensors, all of them as the text says."""
    found = sealed.copy()
    tensors = found.tensors
    name = draw(st.sampled_from(list(tensors)))
    what = draw(st.sampled_from(["bits", "type", "shape", "remove", "rename", "add"]))
    tensor = tensors[name]
    if what == "bits":
        numbers = tensor.reshape(-1).view(torch.uint8)
        numbers[draw(st.integers(0, max(len(numbers) - 1, 0))) :][:4] = draw(st.sampled_from([0, 1, 127, 128, 255]))
    elif what == "type":
        same = [dtype for dtype in DTYPES if dtype.itemsize == tensor.dtype.itemsize]
        tensors[name] = tensor.view(draw(st.sampled_from(same)))
    elif what == "shape":
        sizes = draw(st.lists(st.integers(0, 20), max_size=5))
        tensors[name] = torch.zeros(sizes, dtype=draw(st.sampled_from([tensor.dtype, *DTYPES])))
    elif what == "remove":
        del tensors[name]
    else:
        other = draw(
            st.sampled_from(["x", "../x", "8.weight", f"{name}@mask", f"{name}@values", "@ranges", "module.x"])
        )
        tensors[other] = tensors.pop(name) if what == "rename" else torch.zeros(3)
    found.tensors = tensors
    return found


@st.composite
def changed_bytes(draw: st.DrawFn, sealed: Sealed) -> Sealed:
    """Bytes of tensors that are changed, cut off or added."""
    found = sealed.copy()
    at = draw(st.integers(0, len(found.content)))
    added = draw(st.binary(max_size=8))
    found.content = found.content[:at] + added + found.content[at + draw(st.integers(0, 8)) :]
    return found


def files() -> st.SearchStrategy[Sealed]:
    changes = (changed_text, changed_text, changed_tensors, changed_bytes)
    return st.one_of(*(change(sound(kind)) for kind in KINDS for change in changes))


@pytest.mark.parametrize("examples", [80, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_file_is_read_or_refused_and_a_refused_one_leaves_the_model_as_it_was(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "model.safetensors"

    def read(sealed: Sealed) -> None:
        seal(path, sealed)
        readers: list[Callable[[Path], Any]] = [gossamer.load, read_about, read_description, read_integers]
        for reader in readers:
            with contextlib.suppress(GossamerError):
                reader(path)
        model = network(tied="thinned" not in sealed.metadata)
        before = fingerprint(model)
        try:
            gossamer.load(path, model)
        except GossamerError:
            assert fingerprint(model) == before
            raise
        if THINNED.items() <= read_about(path).items():
            return  # sizes may fit the layers, and not each other
        with torch.no_grad():
            model(images())

    outcome = fuzz(files(), examples, read, tmp_path)
    assert outcome.accepted > examples // 20
    assert outcome.refused > examples // 10
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


@functools.cache
def whole_model() -> Sealed:
    """A file that says what model it is of."""
    made = open_subject("shufflenet_v2_x0_5", input_shape="1,3,32,32", num_classes=None)
    about = {**made.about(), "num_classes": "1000"}
    with tempfile.TemporaryDirectory() as folder:
        return unseal(save(made.model, Path(folder) / "model.safetensors", "safetensors", about=about).path)


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_an_export_of_a_file_writes_into_its_folder_only(tmp_path: Path, examples: int) -> None:
    path, out = tmp_path / "model.safetensors", tmp_path / "out"
    document = {"metadata": as_document(whole_model())["metadata"]}
    entries, content = whole_model().entries, whole_model().content

    def write(changed: dict[str, Any]) -> None:
        sealed = from_document({"metadata": changed.get("metadata"), "entries": entries}, content)
        seal(path, sealed)
        write_subject(open_subject(str(path)), Export(["bitmask"]), out)

    outcome = fuzz(mutated(document, most=1), examples, write, tmp_path)
    assert outcome.accepted > examples // 20
    assert outcome.refused > examples // 10
    assert {found.name for found in tmp_path.iterdir()} == {"model.safetensors", "out"}
    assert all(found.suffix == ".safetensors" for found in out.iterdir())
