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
from gossamer.io import DTYPES
from gossamer.models import load_model
from gossamer.runner.model_files import Export, read_description
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
    first = nn.Linear(32, 32)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        first,
        nn.ReLU(),
        first if tied else nn.Linear(32, 32),
        nn.Linear(32, 10),
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
            keep = pattern.mask(magnitude(layer.weight), 0.5 if "sparse24" in kind else 0.8)
            layer.weight.masked_fill_(~keep.bool(), 0.0)
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
        found = unseal(save(model, Path(folder) / "model.safetensors", format, about=about).path)
    assert format == "safetensors" or f'["{format}",' in found.metadata["packed"]
    return found


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
def changed_metadata(draw: st.DrawFn, sealed: Sealed) -> Sealed:
    """Another value in what the file says, and the tensors as they are."""
    document = as_document(sealed)
    key = draw(st.sampled_from([key for key in document["metadata"] if key != "kind"]))
    changed = draw(mutated({key: document["metadata"][key]}, most=1))
    document["metadata"] = {**document["metadata"], **changed}
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
    changes = (changed_text, changed_metadata, changed_metadata, changed_tensors, changed_tensors, changed_bytes)
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
    assert outcome.accepted > examples // 8
    assert outcome.refused > examples // 8
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


def typed(kind: str, dtype: torch.dtype, name: str) -> Sealed:
    found = sound(kind).copy()
    found.tensors = {**found.tensors, name: found.tensors[name].view(dtype)}
    return found


def said(kind: str, key: str, *steps: str | int, value: Any) -> Sealed:
    """A file with another value in its metadata, at the end of these steps into what is JSON there."""
    found = sound(kind).copy()
    whole = {key: json.loads(found.metadata[key]) if steps else value}
    holder: Any = whole
    for step in (key, *steps)[:-1]:
        holder = holder[step]
    holder[(key, *steps)[-1]] = value
    found.metadata[key] = json.dumps(whole[key]) if not isinstance(whole[key], str) else whole[key]
    return found


def with_ranges(value: float) -> Sealed:
    found = sound("int8").copy()
    found.tensors = {**found.tensors, "@ranges": torch.full_like(found.tensors["@ranges"], value)}
    return found


ILLEGIBLE = "its metadata 'quantized' is invalid"


@pytest.mark.parametrize(
    ("sealed", "message"),
    [
        (lambda: typed("safetensors", torch.uint64, "1.num_batches_tracked"), "is uint64 in the file and int64 in the"),
        (lambda: typed("safetensors", torch.uint32, "8.weight"), "is uint32 in the file and float32 in the model"),
        (lambda: said("int8", "quantized", "schemes", 0, "inputs", "symmetric", value=0.5), ILLEGIBLE),
        (lambda: said("int8", "quantized", "schemes", 0, "weights", "reduced", value=[]), ILLEGIBLE),
        (lambda: said("int8", "quantized", "schemes", 0, "weights", "bits", value=1e-320), ILLEGIBLE),
        (lambda: said("int8", "quantized", "modules", "0", value=-1), ILLEGIBLE),
        (lambda: said("int8", "quantized", "weights", "0.weight", 2, value="U64"), ILLEGIBLE),
        (lambda: said("int8", "quantized", value="[" * 5000), ILLEGIBLE),
        (lambda: with_ranges(float("nan")), "its ranges are not all finite"),
    ],
)
def test_what_was_found_once_is_refused(tmp_path: Path, sealed: Callable[[], Sealed], message: str) -> None:
    path, model = seal(tmp_path / "model.safetensors", sealed()), network()
    before = fingerprint(model)
    with pytest.raises(GossamerError) as error:
        gossamer.load(path, model)
    assert message in str(error.value)
    assert fingerprint(model) == before


def test_truth_values_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.tensor([True, False, True]))
    path = save(model, tmp_path / "model.safetensors", "safetensors").path
    changed = unseal(path)
    changed.content = changed.content.replace(b"\x01\x00\x01", b"\x02\x00\x01")
    seal(path, changed)
    with pytest.raises(GossamerError, match="boolean values"):
        gossamer.load(path, model)
    assert model.kept.tolist() == [True, False, True]


@functools.cache
def whole_model() -> Sealed:
    """A file that says what model it is of."""
    made = load_model("shufflenet_v2_x0_5", input_shape="1,3,32,32", num_classes=None)
    about = {**made.describe(), "num_classes": "1000"}
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
        load_model(str(path)).export(Export(["bitmask"]), out)

    outcome = fuzz(mutated(document, most=1), examples, write, tmp_path)
    assert outcome.accepted > examples // 20
    assert outcome.refused > examples // 10
    assert {found.name for found in tmp_path.iterdir()} == {"model.safetensors", "out"}
    assert all(found.suffix == ".safetensors" for found in out.iterdir())
