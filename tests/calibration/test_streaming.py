"""One-shot methods on a folder: the same bits as in memory, resumed at blocks, and errors that change nothing."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.calibration import checkpoint
from tests.calibration.models import llama, recipe, tokens

SPARSE = recipe("SparseGPTModifier: {sparsity: 0.5, mask_structure: '2:4', targets: ['re:.*proj.weight']}")


def saved(folder: Path, dtype: torch.dtype = torch.float32, shards: str = "1GB", **settings: Any) -> Path:
    llama(num_hidden_layers=3, **settings).to(dtype).save_pretrained(str(folder), max_shard_size=shards)
    return folder


def loaded(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder))


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_a_streamed_folder_has_the_bits_of_the_model_in_memory(tmp_path: Path, tied: bool, shards: str) -> None:
    source = saved(tmp_path / "model", shards=shards, tie_word_embeddings=tied)
    before = weights(source)
    method = recipe(
        "SparseGPTModifier: {sparsity: 0.5, ignore: ['re:.*embed']}", "GPTQModifier: {scheme: W8A16, ignore: [lm_head]}"
    )
    model = loaded(source)
    gossamer.oneshot(model, recipe=method, data=tokens())
    assert gossamer.oneshot(str(source), recipe=method, data=tokens(), output=tmp_path / "out") is None
    assert same(model, loaded(tmp_path / "out"))
    assert weights(source) == before
    assert not (tmp_path / "out" / ".gossamer-oneshot.json").exists()
    if not tied:
        assert float((loaded(tmp_path / "out").lm_head.weight == 0).double().mean()) == 0.5


def test_half_precision_stays_half_precision_and_sparse(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", torch.bfloat16)
    gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output_dir=tmp_path / "out")
    result = loaded(tmp_path / "out")
    assert {value.dtype for value in result.parameters()} == {torch.bfloat16}
    assert all((value == 0).double().mean() == 0.5 for name, value in result.named_parameters() if "proj" in name)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4


@pytest.mark.parametrize("last", range(1, 4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interrupted_after_any_block_it_ends_in_the_same_bits(tmp_path: Path, last: int, dtype: torch.dtype) -> None:
    source = saved(tmp_path / "model", dtype)
    gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "whole")

    def interrupt(label: str, share: float) -> None:
        if share > (last - 0.5) / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "parts", progress=interrupt)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == last - 1
    steps: list[float] = []
    gossamer.oneshot(
        source,
        recipe=SPARSE,
        data=tokens(),
        output=tmp_path / "parts",
        progress=lambda label, share: steps.append(share),
    )
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert len(steps) == 7 * (4 - last)


def test_only_one_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "model")
    held: set[str] = set()
    most: list[set[str]] = []
    read = checkpoint.Checkpoint.read

    def counted(self: checkpoint.Checkpoint, name: str) -> torch.Tensor:
        if name.startswith("model.layers."):
            held.add(name.split(".")[2])
        return read(self, name)

    write = checkpoint.OutputFolder.write

    def written(self: checkpoint.OutputFolder, number: int, tensors: Any) -> None:
        most.append(set(held))
        held.clear()
        write(self, number, tensors)

    monkeypatch.setattr(checkpoint.Checkpoint, "read", counted)
    monkeypatch.setattr(checkpoint.OutputFolder, "write", written)
    gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "out")
    assert most[:3] == [{"0"}, {"1"}, {"2"}]


def test_texts_are_read_with_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    write_tokenizer(source)
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and the dog sat too " * 40)
    method = recipe("WandaPruningModifier: {sparsity: 0.5}")
    gossamer.oneshot(
        source, recipe=method, data=str(tmp_path / "corpus.txt"), output=tmp_path / "out", max_seq_length=16
    )
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert float((loaded(tmp_path / "out").model.layers[0].mlp.up_proj.weight == 0).double().mean()) == 0.5


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["the", "cat", "sat", "on", "mat", "and", "dog", "too"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, "?"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(str(folder))


def test_a_full_disk_is_one_error_and_the_same_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "model")
    before = weights(source)
    seal = checkpoint.write_sealed
    count = 0

    def full(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        seal(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_sealed", full)
        with pytest.raises(gossamer.GossamerError, match="cannot be written: No space left on device; finished parts"):
            gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "out")
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".safetensors", ".safetensors"]
    assert weights(source) == before
    gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "out")
    assert loaded(tmp_path / "out")


def test_an_output_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for target, message in (
        (out, "is not empty"),
        (source, "is the folder of the model"),
        (out / "notes.txt", "not a"),
    ):
        with pytest.raises(gossamer.GossamerError, match=message):
            gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=target)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    with pytest.raises(gossamer.GossamerError, match="output: a model in a folder needs a folder"):
        gossamer.oneshot(source, recipe=SPARSE, data=tokens())


def test_another_recipe_does_not_continue_an_interrupted_run(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")

    def interrupt(label: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "out", progress=interrupt)
    for other in ({"recipe": SPARSE + "# other"}, {"data": tokens(seed=1)}):
        given = {"recipe": SPARSE, "data": tokens(), **other}
        with pytest.raises(gossamer.GossamerError, match="interrupted run of another model, recipe or data"):
            gossamer.oneshot(source, output=tmp_path / "out", **given)


def damage(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    match how:
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
        case "noise":
            file.write_bytes(b"\xff" * 64)
        case "missing":
            file.unlink()
        case "config":
            (folder / "config.json").write_text("{")
        case "no blocks":
            shutil.rmtree(folder)
            saved_without_blocks(folder)
        case _:
            from safetensors.torch import load_file, save_file

            tensors = load_file(file)
            del tensors["model.layers.1.mlp.up_proj.weight"]
            save_file(tensors, file)


def saved_without_blocks(folder: Path) -> None:
    llama(num_hidden_layers=1).save_pretrained(str(folder))


BAD = [
    ("cut", "model.safetensors: is damaged, or not a safetensors file"),
    ("noise", "model.safetensors: is damaged, or not a safetensors file"),
    ("missing", "holds neither model.safetensors nor"),
    ("config", "is not a model that Transformers can build"),
    ("no blocks", "no repeated blocks were found in LlamaForCausalLM"),
    ("tensor", "the checkpoint has no 'model.layers.1.mlp.up_proj.weight', which LlamaForCausalLM needs"),
]


@pytest.mark.parametrize(("how", "message"), BAD)
def test_a_bad_folder_is_one_error_and_nothing_is_written(tmp_path: Path, how: str, message: str) -> None:
    source = saved(tmp_path / "model")
    damage(source, how)
    with pytest.raises(gossamer.GossamerError, match=message) as caught:
        gossamer.oneshot(source, recipe=SPARSE, data=tokens(), output=tmp_path / "out")
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "out").exists()


def test_what_a_folder_cannot_do_names_what_can(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    with pytest.raises(gossamer.GossamerError, match="SmoothQuantModifier does not run on a folder; load the model"):
        gossamer.oneshot(source, recipe=recipe("SmoothQuantModifier: {}"), data=tokens(), output=tmp_path / "out")
    with pytest.raises(gossamer.GossamerError, match="a text file or batches of token ids are needed"):
        gossamer.oneshot(source, recipe=SPARSE, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
