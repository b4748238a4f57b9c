"""Checkpoints come back to the bit, and no crash, full disk or damaged file loses the ones before."""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

import gossamer
from gossamer.errors import GossamerError
from gossamer.runner import checkpoint as checkpoint_module
from gossamer.runner import checkpoint as checkpoints
from gossamer.runner.checkpoint import CheckpointError, Checkpoints, describe, read_checkpoint
from gossamer.runner.weights import read_weights

COUNTS = {"linear": (12, 9), "convolution": (24, 23)}


def state(value: float = 1.0, **more: object) -> dict:
    weight = torch.full((4, 3), value)
    weight[0] = 0
    half = torch.arange(24, dtype=torch.bfloat16).reshape(1, 2, 3, 4)
    model = {"fc.weight": weight, "conv.weight": half, "bn.count": torch.tensor(7), "tied": weight[:, 1]}
    return {"model": model, "optimizer": {"state": {0: {"momentum": weight.t()}}}, "config": "net: a\n", **more}


def save(folder: Checkpoints, iteration: int, *, best: bool = False, value: float | None = None) -> Path:
    content = state(float(iteration) if value is None else value)
    return folder.save(
        content, iteration=iteration, epoch=iteration / 10, metrics={"top1": 50.0}, best=best, weights=COUNTS
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_a_checkpoint_comes_back_with_what_it_says_of_itself(kept: Checkpoints) -> None:
    metrics = {"top1": 91.5, "loss": math.nan}
    path = kept.save(state(), iteration=120, epoch=1.5, metrics=metrics, best=False)
    assert path.name == "iter_00000120.safetensors"
    found = read_checkpoint(path)
    assert (found.iteration, found.epoch, found.config, found.path) == (120, 1.5, "net: a\n", path)
    assert found.metrics["top1"] == 91.5
    assert math.isnan(found.metrics["loss"])
    assert found.ema is None
    for name, tensor in state()["model"].items():
        assert torch.equal(found.weights[name], tensor)
        assert found.weights[name].dtype == tensor.dtype
    assert torch.equal(found.state["optimizer"]["state"][0]["momentum"], state()["model"]["fc.weight"].t())


def test_a_checkpoint_is_described_without_its_tensors(kept: Checkpoints) -> None:
    path = save(kept, 3)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # a tensor is damaged, and nobody looks
    path.write_bytes(content)
    about = describe(path)
    assert (about.iteration, about.epoch, about.metrics, about.config) == (3, 0.3, {"top1": 50.0}, "net: a\n")
    assert about.counts == COUNTS


def test_other_tools_read_the_weights_by_their_names(kept: Checkpoints) -> None:
    path = save(kept, 1)
    with safe_open(path, "pt") as file:
        assert {name for name in file.keys() if not name.startswith("@/")} == set(state()["model"])  # noqa: SIM118
        for name, tensor in state(1.0)["model"].items():
            assert torch.equal(file.get_tensor(name), tensor)
        assert file.metadata()["iteration"] == "1"


def test_large_tensors_are_written_and_read_without_a_second_copy(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    own = checkpoint_module._bytes_of

    def watched(tensor: torch.Tensor) -> memoryview:
        numbers = own(tensor)
        written.append(torch.frombuffer(numbers, dtype=torch.uint8).data_ptr())
        return numbers

    monkeypatch.setattr(checkpoint_module, "_bytes_of", watched)
    weight = torch.rand(100, 10)
    path = kept.save({"model": {"w": weight}}, iteration=1, epoch=0.0, metrics={}, best=False)
    assert written == [weight.data_ptr()]
    assert torch.equal(read_checkpoint(path).weights["w"], weight)


def test_a_state_that_cannot_be_written_touches_nothing(kept: Checkpoints) -> None:
    path = save(kept, 1, value=5.0)
    before = path.read_bytes()
    with pytest.raises(GossamerError, match=r"state\['hooks'\]\[0\] is of type object, which a checkpoint cannot hold"):
        kept.save(state(hooks=[object()]), iteration=1, epoch=0.1, metrics={}, best=True)
    assert names(kept.folder) == [path.name]
    assert path.read_bytes() == before


# Which stay


def test_the_last_ones_and_the_best_stay(kept: Checkpoints) -> None:
    for iteration in (10, 20, 30, 40):
        save(kept, iteration, best=iteration == 10)
    assert names(kept.folder) == ["best.safetensors", "iter_00000030.safetensors", "iter_00000040.safetensors"]
    assert kept.latest() == kept.folder / "iter_00000040.safetensors"
    assert kept.best() == kept.folder / "best.safetensors"
    assert read_checkpoint(kept.best()).iteration == 10


def test_the_best_is_a_copy_where_links_are_not_offered(kept: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    save(kept, 10, best=True)
    assert read_checkpoint(kept.best()).iteration == 10


def test_a_run_that_turned_back_keeps_what_it_writes(kept: Checkpoints) -> None:
    for iteration in (10, 20, 30):
        save(kept, iteration)
    save(kept, 25)
    assert names(kept.folder) == ["iter_00000020.safetensors", "iter_00000025.safetensors"]


def test_files_of_others_stay(kept: Checkpoints) -> None:
    kept.folder.mkdir()
    others = ["notes.txt", "iter_1.safetensors", "iter_00000001.pt", ".hidden.safetensors", "mine.safetensors"]
    for name in others:
        (kept.folder / name).write_text("")
    (kept.folder / "iter_00000002.safetensors").mkdir()
    for iteration in (10, 20, 30):
        save(kept, iteration)
    assert set(others) | {"iter_00000002.safetensors"} <= set(names(kept.folder))


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("module", "step"), [(os, "replace"), (os, "fsync"), (checkpoints, "flush_folder"), (Checkpoints, "_prune")]
)
def test_a_process_killed_between_two_steps_leaves_a_usable_folder(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch, module: object, step: str
) -> None:
    for iteration in (10, 20):
        save(kept, iteration, best=True)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, step, die)
        with pytest.raises(Killed):
            save(kept, 30, best=True)
    again = Checkpoints(kept.folder, keep=2)
    assert again.load_latest().iteration in {20, 30}
    assert read_checkpoint(again.best()).iteration in {20, 30}
    save(again, 30, best=True)
    assert names(kept.folder) == ["best.safetensors", "iter_00000020.safetensors", "iter_00000030.safetensors"]


# Damage


def sampled(length: int) -> list[int]:
    """Positions all over a file, more at its start."""
    return sorted({*range(0, min(length, 400), 7), *range(0, length, max(length // 60, 1)), length - 1})


def test_a_file_that_is_cut_at_any_byte_is_found_out(kept: Checkpoints) -> None:
    path = save(kept, 1)
    content = path.read_bytes()
    for length in sampled(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"^[^\n]+iter_00000001.safetensors: [^\n]+$"):
            read_checkpoint(path)
        with pytest.raises(CheckpointError):
            describe(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="it has 1 extra bytes"):
        read_checkpoint(path)


def test_any_flipped_bit_is_found_out(kept: Checkpoints) -> None:
    path = save(kept, 1)
    content = path.read_bytes()
    for count, position in enumerate(sampled(len(content))):
        damaged = bytearray(content)
        damaged[position] ^= 1 << count % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"^[^\n]+iter_00000001.safetensors: [^\n]+$"):
            read_checkpoint(path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (empty, "the checkpoint is damaged: it has 0 bytes"),
        (cut, "the checkpoint is damaged: it has"),
        (make_folder, "is a folder; give a checkpoint, which is a file"),
        (dangle, "no such file"),
    ],
)
def test_a_damaged_latest_is_reported_and_the_one_before_is_used(
    kept: Checkpoints, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    save(kept, 10)
    damage(save(kept, 20))
    with caplog.at_level(logging.WARNING):
        found = kept.load_latest()
    assert found.iteration == 10
    first, second = caplog.messages
    assert first.startswith(f"{kept.folder}/iter_00000020.safetensors: {reason}")
    assert second == f"{kept.folder}/iter_00000010.safetensors: used instead, from iteration 10"


def test_the_best_is_the_last_resort(kept: Checkpoints) -> None:
    for iteration in (10, 20, 30):
        save(kept, iteration, best=iteration == 10)
    for path in kept.all():
        empty(path)
    assert kept.load_latest().iteration == 10
    empty(kept.best())
    with pytest.raises(CheckpointError, match=r"none of 3 .* be read; remove them to start again\n.*iter_"):
        kept.load_latest()


def test_an_empty_or_missing_folder_has_no_checkpoint(kept: Checkpoints) -> None:
    assert (kept.latest(), kept.best(), kept.load_latest()) == (None, None, None)
    kept.folder.mkdir()
    assert (kept.latest(), kept.best(), kept.load_latest()) == (None, None, None)


def test_a_newer_format_is_refused_and_not_passed_over(kept: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(kept, 10)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "VERSION", 2)
        save(kept, 20)
    with pytest.raises(
        CheckpointError, match="the checkpoint is newer: it has format 2, and this version reads up to 1; use gossamer"
    ):
        kept.load_latest()


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "text.txt"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    weights = {"fc.weight": torch.rand(50, 3)}
    if name.endswith(".safetensors"):
        safetensors.torch.save_file(weights, path)
    elif name.endswith(".pt"):
        torch.save(weights, path)
    else:
        path.write_text("no checkpoint\n" * 20)
    with pytest.raises(CheckpointError, match=f"{name}: is not a Gossamer checkpoint, .*saver.pretrain_model"):
        read_checkpoint(path)


# A full disk


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_a_file_that_may_not_grow_leaves_the_checkpoints_before_it(kept: Checkpoints) -> None:
    import resource

    save(kept, 1, best=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(GossamerError) as caught:
            kept.save({"model": {"w": torch.ones(1_000_000)}}, iteration=2, epoch=0.0, metrics={}, best=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"{kept.folder}/iter_00000002.safetensors: the checkpoint cannot be written: {os.strerror(errno.EFBIG)}; "
        "earlier checkpoints are intact; free some space or lower saver.keep, then resume"
    )
    assert names(kept.folder) == ["best.safetensors", "iter_00000001.safetensors"]
    assert kept.load_latest().iteration == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_at_the_end_is_reported_too(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(kept, 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(GossamerError, match="No space left on device; earlier checkpoints are intact; free some"):
            save(kept, 20)
    assert names(kept.folder) == ["iter_00000010.safetensors"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GossamerError, match="file/checkpoints: cannot be created: Not a directory; choose another"):
        save(Checkpoints(tmp_path / "file" / "checkpoints", keep=1), 1)


# Weights of every kind


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.full((2, 2), value), "fc.bias": torch.zeros(2)}


def averaged() -> dict:
    model = torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Linear(2, 2)))
    nn.init.constant_(model.module[0].weight, 2.0)
    return {name.replace("0.", "fc."): tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (weights(), 1),
        ({"state_dict": {f"module.{name}": tensor for name, tensor in weights().items()}}, 1),
        ({"model": {f"_orig_mod.module.{name}": tensor for name, tensor in weights().items()}}, 1),
        ({"model": weights(), "ema": {"decay": 0.9, "ema_state_dict": weights(2)}}, 2),
        ({"model": weights(), "ema": averaged()}, 2),
        ({"model": weights(), "ema": {}}, 1),
        ({"model": {**weights(), "__fc.weight_mma_mask": torch.ones(2, 2)}}, 1),
    ],
)
def test_weights_are_found_wherever_they_are_in_a_torch_file(tmp_path: Path, content: dict, value: int) -> None:
    torch.save(content, tmp_path / "file.pth")
    found = read_weights(tmp_path / "file.pth")
    assert set(found) == set(weights())
    assert torch.equal(found["fc.weight"], weights(value)["fc.weight"])


@pytest.mark.parametrize(("ema", "value"), [(None, 1), (weights(2), 2)])
def test_averaged_weights_of_a_checkpoint_come_before_others(
    kept: Checkpoints, ema: dict[str, torch.Tensor] | None, value: int
) -> None:
    content = {"model": weights(), "ema": ema}
    path = kept.save(content, iteration=1, epoch=0.0, metrics={}, best=False)
    assert torch.equal(read_weights(path)["fc.weight"], weights(value)["fc.weight"])


def test_weights_come_from_safetensors(tmp_path: Path) -> None:
    safetensors.torch.save_file(weights(3), tmp_path / "w.safetensors")
    assert torch.equal(read_weights(tmp_path / "w.safetensors")["fc.weight"], weights(3)["fc.weight"])


class Trap:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("the file was run",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file of weights"),
        (b"", "cannot be read as weights"),
        (b"half a file", "cannot be read as weights"),
        ({"epoch": 1}, "cannot be read as weights: it holds no state dict"),
        ({"model": Trap()}, "is not a state dict of tensors; save model.state_dict()"),
    ],
)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_files_without_weights_are_reported_in_one_sentence(
    tmp_path: Path, content: object, words: str, suffix: str
) -> None:
    path = tmp_path / f"file.{suffix}"
    if isinstance(content, bytes):
        path.write_bytes(content)
        words = words if suffix == "pth" else "safetensors file, or is cut short"
    elif content is not None:
        torch.save(content, path)
        words = words if suffix == "pth" else "PyTorch"
    with pytest.raises(GossamerError) as caught:
        read_weights(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_gives_no_weights(kept: Checkpoints) -> None:
    path = save(kept, 1)
    cut(path)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        read_weights(path)


@pytest.mark.parametrize("said", [3, 9])
def test_a_checkpoint_that_says_another_iteration_than_its_name_is_left_out(
    kept: Checkpoints, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (1, 2, 4):
        save(kept, iteration)
    path = kept.folder / "iter_00000004.safetensors"
    checkpoint_module.write_checkpoint(path, state(), iteration=said, epoch=0.0, metrics={"top1": 50.0})
    before = names(kept.folder)
    found = kept.load_latest()
    assert found is not None
    assert found.iteration == 2
    assert f"its name says iteration 4, its content iteration {said}" in caplog.text
    about = kept.model()
    assert about is not None
    assert about.iteration == 2
    kept.complete(read_checkpoint(path), "top1")
    assert path.exists()
    assert set(names(kept.folder)) <= set(before)


@pytest.mark.parametrize("name", ["best.safetensors", "iter_00000009.safetensors"])
def test_a_pipe_is_no_checkpoint(kept: Checkpoints, name: str) -> None:
    save(kept, 1)
    os.mkfifo(kept.folder / name)
    found = kept.load_latest()
    assert found is not None
    assert found.iteration == 1
    with pytest.raises(CheckpointError, match="cannot be read: it is a pipe or a device"):
        describe(kept.folder / name)
    for read in (read_weights, gossamer.load):
        with pytest.raises(GossamerError, match=r"no such file|file not found"):
            read(kept.folder / name)
