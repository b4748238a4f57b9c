"""Files that the fuzz tests seal again are sound ones with other content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.runner.checkpoint import CheckpointError, describe, read_checkpoint, write_checkpoint
from tests.fuzz.sealing import seal, unseal

STATE = {"model": {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3), "h": torch.ones(3, dtype=torch.bfloat16)}}


def test_a_file_that_is_sealed_again_is_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, STATE, iteration=3, epoch=0.5, metrics={"top1": 50.0})
    sealed = unseal(path)
    assert seal(tmp_path / "b.safetensors", sealed).read_bytes() == path.read_bytes()
    sealed.tensors = sealed.tensors
    assert seal(tmp_path / "c.safetensors", sealed).read_bytes() == path.read_bytes()


def test_changed_text_and_tensors_get_behind_the_digests(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, STATE, iteration=3, epoch=0.5, metrics={})
    path.write_bytes(path.read_bytes().replace(b'"iteration":"3"', b'"iteration":"4"'))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        describe(path)
    write_checkpoint(path, STATE, iteration=3, epoch=0.5, metrics={})
    sealed = unseal(path)
    sealed.metadata["iteration"] = "4"
    sealed.tensors = sealed.tensors | {"w": torch.ones(2, 3)}
    seal(path, sealed)
    assert describe(path).iteration == 4
    assert torch.equal(read_checkpoint(path).weights["w"], torch.ones(2, 3))
