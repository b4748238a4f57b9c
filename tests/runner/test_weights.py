"""Weights in PyTorch's own format that come from elsewhere: read, or refused before a model changes."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.integrations.adapter import STATE_FILE, read_state
from gossamer.runner.weights import load_weights, read_weights
from tests.fuzz.harness import attempt, fingerprint

PICKLES = {
    "nothing to return": b"\x80\x02.",
    "an empty stack": b"\x80\x02R.",
    "a persistent id that is a number": b"\x80\x02K\x01Q.",
    "an odd state": b"\x80\x02ccollections\nOrderedDict\n)RK\x01b.",
    "a tensor of nothing": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "a dict that holds itself": b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s.",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "plain"])
@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_malformed_pickle_is_refused(content: bytes, archive: bool, tmp_path: Path) -> None:
    path = tmp_path / STATE_FILE
    path.write_bytes(content)
    if archive:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a/data.pkl", content)
            file.writestr("a/version", "3\n")
            file.writestr("a/byteorder", "little")
    with pytest.raises(GossamerError, match=r"gossamer\.pt: (cannot be read as weights|is not a state dict)"):
        read_weights(path)
    with pytest.raises(GossamerError, match=r"gossamer\.pt: not a recipe state"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("of layout sparse_coo", lambda tensor: tensor.to_sparse()),
        ("of layout sparse_csr", lambda tensor: tensor.to_sparse_csr()),
        ("without values", lambda tensor: tensor.to("meta")),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_tensor_that_is_not_dense_is_refused_before_the_model_changes(
    kind: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    model = network()
    before = fingerprint(model)
    # The bias is first in the file, and would be copied first.
    torch.save({"1.bias": torch.ones(3), "1.weight": change(torch.ones(3, 4))}, tmp_path / "weights.pt")
    with pytest.raises(GossamerError, match=f"'1.weight' is a tensor {kind}; save it as a dense tensor"):
        load_weights(model, tmp_path / "weights.pt")
    assert fingerprint(model) == before


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"1.weight": torch.ones(3, 4)}, path)
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(GossamerError, match=r"packed\.pt: .*a compressed archive; write it with torch\.save"):
        read_weights(tmp_path / "packed.pt")


def test_entries_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"1.weight": torch.ones(300, 400)}, path)
    with zipfile.ZipFile(path, "a") as file:
        largest = max(file.infolist(), key=lambda entry: entry.file_size)
        file.filelist.extend([largest] * 3)
        file.writestr("x", "")
    with pytest.raises(GossamerError, match="its entries are larger than its"):
        read_weights(path)


def test_dicts_that_share_a_dict_take_no_time(tmp_path: Path) -> None:
    inner: dict[str, object] = {"none": 1}
    for _ in range(30):
        inner = dict.fromkeys(("ema", "state_dict", "model", "module"), inner)
    torch.save(inner, tmp_path / "weights.pt")
    assert not attempt(lambda: read_weights(tmp_path / "weights.pt"))


def test_weights_of_every_usual_form_are_read(tmp_path: Path) -> None:
    weights = network().state_dict()
    for index, held in enumerate((weights, {"model": weights}, {"state_dict": {"module": weights}}, dict(weights))):
        torch.save(held, tmp_path / f"{index}.pt", _use_new_zipfile_serialization=index != 3)
        found = read_weights(tmp_path / f"{index}.pt")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("key", ["format", "mark", "state"])
def test_a_state_file_with_a_tensor_for_a_number_is_refused(key: str, tmp_path: Path) -> None:
    torch.save({"format": 1, "mark": "", "state": {}, key: torch.zeros(2)}, tmp_path / STATE_FILE)
    with pytest.raises(GossamerError, match="not a recipe state"):
        read_state(tmp_path)
