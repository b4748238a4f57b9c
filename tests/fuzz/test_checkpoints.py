"""Checkpoints with any content: read, described, refused with the file and the part, and replaced by the one before."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.errors import GossamerError
from gossamer.io import write_sealed
from gossamer.runner._encoding import DecodingError, decode, encode
from gossamer.runner.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    describe,
    read_checkpoint,
    write_checkpoint,
)
from gossamer.runner.training_state import read_training_state, run_setting
from gossamer.runner.weights import read_weights
from tests.fuzz.harness import attempt, fuzz
from tests.fuzz.sealing import Sealed, seal, unseal
from tests.fuzz.values import hostile, mutated
from tests.runner.running_on_digits import config, evaluated, interrupted, resumed

LAST, BEFORE = "iter_00000004.safetensors", "iter_00000002.safetensors"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
DEEP = "[" * 50_000 + "]" * 50_000
TEXTS = ("state", "metrics", "weights")
"""Metadata that are JSON."""

Change = Callable[[Sealed], None]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations that was stopped behind the fourth; it has two checkpoints."""
    root = tmp_path_factory.mktemp("checkpoints")
    before = os.environ.get("GOSSAMER_STATE_DIR")
    os.environ["GOSSAMER_STATE_DIR"] = str(root / "state")
    for name in ("dense", "gmp", "amba"):
        folder = root / name
        folder.mkdir()
        kwargs = {"lr": 0.1, "momentum": 0.9}
        trainer = {"max_epoch": None, "max_iter": 6, "save_freq": 2, "test_freq": 6, "log_freq": 2}
        trainer["optimizer"] = {"type": "SGD", "kwargs": kwargs}
        path = config(folder, name, trainer=trainer, net={"type": "tests.runner.nets:small", "kwargs": {"width": 4}})
        settings = json.loads(path.read_text())
        settings["dataset"]["test"]["limit"] = 8
        settings["dataset"]["train"]["batch_size"] = 8
        settings["runtime"]["report"] = {"enable": False}
        settings["trainer"] = {key: value for key, value in settings["trainer"].items() if value is not None}
        path.write_text(json.dumps(settings))
        interrupted(path, 4)
        shutil.copytree(folder / "run", root / f"{name}-pristine")
    yield root
    if before is None:
        del os.environ["GOSSAMER_STATE_DIR"]
    else:
        os.environ["GOSSAMER_STATE_DIR"] = before


def fresh(root: Path, name: str = "dense") -> Path:
    """The run folder as it was when the run was stopped."""
    folder = root / name / "run"
    for path in sorted(folder.rglob("*"), reverse=True):  # by whole paths, which the harness can check
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    shutil.copytree(root / f"{name}-pristine", folder)
    return folder


def taken_apart(path: Path) -> dict[str, Any]:
    """A checkpoint as one document: metadata in which JSON is parsed, and the description of each tensor."""
    sealed = unseal(path)
    texts = {key: json.loads(sealed.metadata[key]) for key in TEXTS}
    return {"metadata": {**sealed.metadata, **texts}, "entries": sealed.entries}


def put_together(document: Any, content: bytes) -> Sealed:
    """A checkpoint of such a document, whatever it has become."""
    whole = document if isinstance(document, dict) else {}
    metadata = whole.get("metadata") if isinstance(whole.get("metadata"), dict) else {}
    entries = whole.get("entries") if isinstance(whole.get("entries"), dict) else {}
    texts = {key: json.dumps(metadata[key]) for key in TEXTS if key in metadata}
    return Sealed({**metadata, **texts}, entries, content)


def texts(document: dict[str, Any], content: bytes) -> st.SearchStrategy[Sealed]:
    """Files in which a little of the text is changed, or bytes of the tensors."""
    metadata = document["metadata"]
    own = values(document)
    documents = st.one_of(
        mutated(metadata["state"], own, most=1).map(
            lambda state: {**document, "metadata": {**metadata, "state": state}}
        ),
        mutated(metadata, own, most=2).map(lambda changed: {**document, "metadata": changed}),
        mutated(document, own),
        st.just(document),
    )
    places = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    contents = st.one_of(
        st.just(content),
        st.just(content),
        places.map(lambda at: content[: at[0]] + bytes([at[1]]) + content[at[0] + 1 :]),
        st.integers(0, len(content)).map(lambda end: content[:end]),
    )
    return st.builds(put_together, documents, contents)


def states(checkpoint: Checkpoint) -> st.SearchStrategy[dict[str, Any]]:
    """States in which values are replaced, also by tensors, and which are then written as they are."""
    tensors = st.one_of(
        st.sampled_from([*checkpoint.weights.values(), checkpoint.state["random"][0]["torch"]]),
        st.sampled_from(
            [torch.tensor(-1), torch.tensor(float("nan")), torch.zeros(0), torch.zeros(3, dtype=torch.bool)]
        ),
        st.sampled_from(
            [torch.zeros((1,) * 70), torch.ones(2, dtype=torch.complex64), torch.zeros(624, dtype=torch.int64)]
        ),
    )
    others = st.sampled_from(
        [np.float64("nan"), np.arange(3), (), (1, 2), b"x", torch.float32, torch.device("cpu"), {1, 2}]
    )
    state = {key: value for key, value in checkpoint.state.items() if key != "config"}
    return mutated(state, st.one_of(hostile, tensors, others), most=2)


def values(document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Malformed values, and sound values of every kind that a state may hold, in wrong places."""
    names = st.sampled_from([*document["entries"], "missing"])
    dtypes = st.sampled_from(["|O", "f4,O", "|V8", "<M8[s]", "<U2", "|u1", "|b1", "<f4", "<i8", "O", "f4", ">c16"])
    shapes = st.lists(st.sampled_from([0, 1, 2, 8, 624, 5056, 2**31, 2**62, -1]), max_size=3)
    return st.one_of(
        hostile,
        names.map(lambda name: {"tensor": name}),
        names.map(lambda name: {"tensor": [name, "channels_last"]}),
        st.tuples(names, dtypes, shapes).map(lambda parts: {"array": list(parts)}),
        st.tuples(dtypes, st.sampled_from(["", "00", "00" * 8, "ff" * 8, "x"])).map(
            lambda pair: {"number": list(pair)}
        ),
        st.sampled_from(["float32", "load", "__class__", "cuda:0", "cuda:999", "nope"]).map(
            lambda name: {"dtype": name}
        ),
        st.sampled_from(["cpu", "cuda:1", "cuda:999999999999", "nope", "float32"]).map(lambda name: {"device": name}),
        hostile.map(lambda value: {"set": [value]}),
        hostile.map(lambda value: {"dict": [[value, 1]]}),
        hostile.map(lambda value: {"size": [value]}),
        st.sampled_from([{"int": "0x" + "f" * 5000}, {"int": "1"}, {"float": "7ff0000000000000"}, {"bytes": "00"}]),
        st.sampled_from([{"tuple": []}, {"dict": {}}, {"ordered": {"a": 1}}, {"counter": [[1, 2]]}, {"x": 1}]),
    )


def used(path: Path) -> None:
    """Everything that reads a checkpoint without building its model, and what may be done with the values."""
    describe(path)
    checkpoint = read_checkpoint(path)
    encode(checkpoint.state)
    for tensor in read_weights(path).values():
        tensor.sum() if tensor.is_complex() else tensor.float().sum()
    run_setting(checkpoint)
    for states in read_training_state(checkpoint).random:
        ours, numpys, torchs = random.Random(), np.random.RandomState(), torch.Generator()
        ours.setstate(states["python"])
        kind, keys, *rest = states["numpy"]
        numpys.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torchs.set_state(states["torch"])
        ours.random(), numpys.rand(700), torch.rand(700, generator=torchs)


@pytest.mark.parametrize("examples", [60, pytest.param(14_000, marks=pytest.mark.slow)])
def test_any_text_of_a_checkpoint_is_read_or_refused(examples: int, pristine: Path) -> None:
    source = fresh(pristine) / "checkpoints" / LAST
    path = source.with_name("changed.safetensors")
    files = texts(taken_apart(source), unseal(source).content)
    outcome = fuzz(files, examples, lambda sealed: used(seal(path, sealed)), source.parent)
    assert outcome.accepted >= examples // 20, outcome
    assert outcome.refused >= examples // 4, outcome


@pytest.mark.parametrize("examples", [40, pytest.param(6_000, marks=pytest.mark.slow)])
def test_any_state_in_a_checkpoint_is_read_or_refused(examples: int, pristine: Path) -> None:
    source = fresh(pristine) / "checkpoints" / LAST
    path = source.with_name("changed.safetensors")
    outcome = fuzz(states(read_checkpoint(source)), examples, lambda state: used(written(path, state)), source.parent)
    assert outcome.accepted >= examples // 20, outcome
    assert outcome.refused >= examples // 4, outcome


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("dense", 12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dense", 800), ("gmp", 300), ("amba", 300))),
    ],
)
def test_a_run_continues_whatever_its_last_checkpoint_holds(name: str, examples: int, pristine: Path) -> None:
    source = fresh(pristine, name) / "checkpoints" / LAST
    used_before: list[bool] = []

    def resume(state: Any) -> None:
        folder = fresh(pristine, name)
        written(folder / "checkpoints" / LAST, state)
        result = resumed(folder)
        assert result.complete
        assert result.iteration == 6
        read_checkpoint(folder / "checkpoints" / "iter_00000006.safetensors")
        used_before.append("used instead, from iteration 2" in (folder / "log.txt").read_text())

    outcome = fuzz(states(read_checkpoint(source)), examples, resume, pristine)
    assert outcome.accepted >= 0.8 * examples, outcome
    assert any(used_before)
    assert not all(used_before) or examples < 100


@pytest.mark.parametrize(
    ("name", "examples"),
    [("dense", 15), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in ("dense", "gmp", "amba"))],
)
def test_any_state_is_evaluated_or_refused(name: str, examples: int, pristine: Path) -> None:
    folder = fresh(pristine, name)
    path = folder / "checkpoints" / "changed.safetensors"
    sound = states(read_checkpoint(path.with_name(LAST)))
    outcome = fuzz(sound, examples, lambda state: evaluated(folder, weights=written(path, state)), pristine)
    assert outcome.accepted >= examples // 10, outcome
    assert outcome.refused >= examples // 10, outcome


def written(path: Path, state: Any) -> Path:
    """Write a state as a checkpoint; one that cannot be written is refused like a file."""
    text = read_checkpoint(path.with_name(BEFORE)).config
    whole = state if isinstance(state, dict) else {}
    write_checkpoint(path, {**whole, "config": text}, iteration=4, epoch=0.16, metrics={})
    return path


# Inputs that once did harm


def in_state(*keys: Any, value: Any) -> Change:
    """Put a value at a place in the text of the state, where each mapping is below its kind."""

    def change(sealed: Sealed) -> None:
        state = json.loads(sealed.metadata["state"])
        holder = state
        for key in keys[:-1]:
            holder = holder[key]
        if value is MISSING:
            del holder[keys[-1]]
        else:
            holder[keys[-1]] = value
        sealed.metadata["state"] = json.dumps(state)

    return change


def in_metadata(key: str, value: Any) -> Change:
    def change(sealed: Sealed) -> None:
        if value is MISSING:
            del sealed.metadata[key]
        else:
            sealed.metadata[key] = value

    return change


MISSING: Any = object()
TORCH = "@/random/0/torch"

UNREADABLE: dict[str, tuple[Change, str]] = {
    "an array of pointers": (in_state("dict", "best", value={"array": [TORCH, "|O", [632]]}), "is an array of '|O'"),
    "an array of records": (in_state("dict", "best", value={"array": [TORCH, "f4,O", [1]]}), "is an array of 'f4,O'"),
    "an array that is too long": (
        in_state("dict", "random", 0, "dict", "torch", value={"array": [TORCH, "<f8", [2**40]]}),
        "of another size than its 5056 bytes",
    ),
    "a tensor that is used twice": (in_state("dict", "best", value={"tensor": TORCH}), "used already"),
    "a tensor that nothing uses": (
        in_state("dict", "random", 0, "dict", "torch", value=None),
        f"nothing uses the tensor '{TORCH}'",
    ),
    "a number of two": (in_state("dict", "best", value={"number": ["<f8", "00"]}), "a number of 1 bytes instead of 8"),
    "a function of torch": (in_state("dict", "best", value={"dtype": "load"}), "is not a dtype: 'load'"),
    "a device that is none": (in_state("dict", "best", value={"device": "cuda:999"}), "is not a device: 'cuda:999'"),
    "a set of lists": (in_state("dict", "best", value={"set": [[1]]}), "has a list in a set"),
    "a list for a key": (in_state("dict", "best", value={"dict": [[[1], 2]]}), "has a list for a key"),
    "a key twice": (in_state("dict", "best", value={"dict": [[1, 2], [1, 3]]}), "has a key twice"),
    "an unknown kind": (in_state("dict", "best", value={"object": "os.system"}), "has the unknown type 'object'"),
    "a large key": (
        in_state("dict", "best", value={"dict": [[{"int": "0x" + "f" * 5000}, {"x": 1}]]}),
        "state['best']",
    ),
    "a state that is a number": (in_metadata("state", "1"), "nothing uses the tensor"),
    "a state that is nested deeply": (in_metadata("state", DEEP), "nested too deeply"),
    "no state": (in_metadata("state", MISSING), "it has no 'state'"),
    "metrics that are nested deeply": (in_metadata("metrics", DEEP), "nested too deeply"),
    "metrics that are text": (in_metadata("metrics", '{"dict": {"top1": "x"}}'), "its 'metrics' is not numbers"),
    "an epoch that is text": (in_metadata("epoch", "x"), "its 'epoch' is not a number of epochs"),
    "an epoch that is not a number": (in_metadata("epoch", "nan"), "its 'epoch' is not a number of epochs"),
    "a negative iteration": (in_metadata("iteration", "-4"), "its 'iteration' is not"),
    "an iteration of 5000 digits": (in_metadata("iteration", "9" * 5000), "its 'iteration' is not"),
    "no iteration": (in_metadata("iteration", MISSING), "it has no 'iteration'"),
    "more zeros than weights": (in_metadata("weights", '{"linear": [1, 2]}'), "its 'weights' is not counts"),
    "a name that a terminal obeys": (in_metadata("metrics", '{"dict": {"\\u001b[2J": 1.0}}'), "its 'metrics' is not"),
}
"""What reading refuses: the change, and what the message says."""

USELESS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no random states": (("random",), MISSING, "it has no 'random'"),
    "random states that are a number": (
        ("random",),
        [1],
        "its 'random' is not a list of random states",
    ),
    "python's position behind the end": (
        ("random", 0, "python"),
        (3, (*range(624), 10**6), None),
        "its 'random' is not a list of random states",
    ),
    "numpy's position behind the end": (
        ("random", 0, "numpy", 2),
        100_000,
        "its 'random' is not a list of random states",
    ),
    "torch's position behind the end": (
        ("random", 0, "torch"),
        lambda state: struct.pack_into("=iiQ", state.numpy(), 8, 500, 1, 624),
        "its 'random' is not a list of random states",
    ),
    "an optimizer that is none": (("optimizer",), {"x": 1}, "its 'optimizer' is not the state of an optimizer"),
    "an entry that is text": (("optimizer", "state", 0), "x", "its 'optimizer' is not the state of an optimizer"),
    "an entry of another shape": (
        ("optimizer", "state", 0, "momentum_buffer"),
        torch.zeros(3),
        "a wrong 'momentum_buffer' for parameter 0",
    ),
    "an entry of another optimizer": (
        ("optimizer", "state", 0),
        {"exp_avg": torch.zeros(1)},
        "other entries for parameter 0 than momentum_buffer",
    ),
    "an entry for no parameter": (("optimizer", "state", 99), {}, "an entry for parameter 99 of 10"),
    "a group without parameters": (("optimizer", "param_groups", 0, "params"), [], "other parameters in group 0"),
    "a momentum that is text": (
        ("optimizer", "param_groups", 0, "momentum"),
        "x",
        "a wrong value in group 0 for 'momentum'",
    ),
    "no learning rate": (("optimizer", "param_groups", 0, "lr"), MISSING, "no 'lr' in group 0"),
    "a learning rate that no weight can hold": (("optimizer", "param_groups", 0, "lr"), 1e308, "for 'lr'"),
    "a negative learning rate": (
        ("optimizer", "param_groups", 0, "lr"),
        -1.0,
        "a setting in group 0 that is not allowed: Invalid learning rate",
    ),
    "a schedule from the future": (("lr_scheduler", "last_epoch"), 10**9, "is not one of 4 steps"),
    "rates that are text": (("lr_scheduler", "rates"), ["x"], "has a wrong 'rates'"),
    "a schedule with rates that are text": (("lr_scheduler", "inner", "base_lrs"), ["x"], "has a wrong 'base_lrs'"),
    "no model": (("model",), MISSING, "its 'model' is not a state dict of tensors"),
    "a model that is numbers": (("model", "0.weight"), 1.0, "its 'model' is not a state dict of tensors"),
    "a weight without a shape": (("model", "1.bias"), torch.tensor(1.0), "'1.bias' has the shape ()"),
    "a weight of another shape": (("model", "0.weight"), torch.zeros(1), "'0.weight' has the shape (1,)"),
    "a weight of other numbers": (("model", "1.num_batches_tracked"), torch.tensor(0.5), "holds float32"),
    "a weight that is missing": (("model", "0.weight"), MISSING, "is of another model or method"),
    "no length of an epoch": (("steps_per_epoch",), 0, "its 'steps_per_epoch' is not a number of iterations"),
    "classes that are numbers": (("classes",), [1], "its 'classes' is not a list of names"),
    "a best metric that is text": (("best",), "x", "its 'best' is not a metric"),
    "an alias bomb for a config": (("config",), BOMB, "more than 50,000 values when its aliases are expanded"),
}
"""What no run can go on with: the place in the state, what is put there, and what the message says."""


def put(state: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The state with another value in a place; a function changes the one that is there."""
    holder: Any = state
    for key in keys[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[keys[-1]]
    elif callable(value):
        value(holder[keys[-1]])
    else:
        holder[keys[-1]] = value
    return state


def spoil(path: Path, change: Change) -> None:
    sealed = unseal(path)
    change(sealed)
    seal(path, sealed)


@pytest.mark.parametrize(("dtype", "shape"), [("|O", [1]), ("f4,O", [1]), ("|V8", [1]), ("O", [1]), ("<U2", [1])])
def test_arrays_that_hold_no_numbers_are_refused(dtype: str, shape: list[int]) -> None:
    with pytest.raises(DecodingError, match=r"^state is an array of '.*'; arrays are of numbers$"):
        decode({"array": ["w", dtype, shape]}, {"w": torch.arange(8, dtype=torch.uint8)})


def test_arrays_do_not_share_memory_with_the_file() -> None:
    tensor = torch.zeros(8, dtype=torch.uint8)
    found = decode({"array": ["w", "<f8", [1]]}, {"w": tensor})
    tensor.fill_(255)
    assert found.tolist() == [0.0]


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_with_file_and_part(name: str, pristine: Path) -> None:
    change, words = UNREADABLE[name]
    path = fresh(pristine) / "checkpoints" / LAST
    spoil(path, change)
    assert not attempt(lambda: used(path))
    with pytest.raises(CheckpointError, match=rf"{LAST}: the checkpoint is damaged: ") as caught:
        read_checkpoint(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [*USELESS, "an array of pointers", "an epoch that is text"])
def test_a_run_continues_from_the_good_checkpoint_beside(name: str, pristine: Path) -> None:
    folder = fresh(pristine)
    path = folder / "checkpoints" / LAST
    if name in USELESS:
        keys, value, words = USELESS[name]
        state = put(read_checkpoint(path).state, keys, value)
        write_checkpoint(path, state, iteration=4, epoch=0.16, metrics={})
    else:
        change, words = UNREADABLE[name]
        spoil(path, change)
    before = path.read_bytes()
    assert attempt(lambda: resumed(folder), pristine)
    log = (folder / "log.txt").read_text()
    assert f"{LAST}: " in log
    assert words in log
    assert f"{BEFORE}: used instead, from iteration 2" in log
    assert Checkpoints(folder / "checkpoints", keep=9).latest() == folder / "checkpoints" / "iter_00000006.safetensors"
    if name in USELESS:
        assert path.with_name(f"{LAST}.unusable").read_bytes() == before, "nothing is lost"


def test_millions_of_values_are_refused_before_they_are_parsed(pristine: Path) -> None:
    path = fresh(pristine) / "checkpoints" / LAST
    sealed = unseal(path)
    many = "[" + "{}," * 1_100_000 + "{}]"  # three bytes a value in the file, and 75 in memory
    seal(path, Sealed({**sealed.metadata, "state": many}, sealed.entries, sealed.content))
    with pytest.raises(CheckpointError, match="is not a Gossamer checkpoint, or is damaged"):
        read_checkpoint(path)
    metadata = {**dict.fromkeys(("digest", "content"), "0" * 64), **sealed.metadata, "state": "@@@"}
    text = json.dumps({"__metadata__": metadata, **sealed.entries}, separators=(",", ":"))
    # Escaped, the signs of JSON are none in the text around it.
    text = text.replace("@@@", "".join(f"\\u{ord(sign):04x}" for sign in many))
    with path.open("wb") as file:
        write_sealed(file, text.encode() + b" " * (-len(text) % 8), [memoryview(sealed.content)])
    with pytest.raises(CheckpointError, match=r"its 'state' is not JSON, too large or nested too deeply"):
        read_checkpoint(path)


def test_a_state_of_millions_of_values_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="too many values outside of tensors; convert long lists to tensors"):
        write_checkpoint(tmp_path / LAST, {"seen": [0] * 2_000_001}, iteration=1, epoch=0.1, metrics={})
    assert not list(tmp_path.iterdir())


def test_shapes_of_layers_that_do_not_fit_together_are_refused(pristine: Path) -> None:
    folder = fresh(pristine)
    path = folder / "checkpoints" / LAST
    state = read_checkpoint(path).state
    state["model"]["0.weight"] = state["model"]["0.weight"][:2]
    state["start_shapes"] = {"0.weight": [2, 3, 3, 3]}
    write_checkpoint(path, state, iteration=4, epoch=0.16, metrics={})
    with pytest.raises(CheckpointError, match=rf"{LAST}: its layers do not fit together"):
        evaluated(folder, weights=path)
    assert resumed(folder).complete


def test_a_run_that_used_the_checkpoint_before_is_the_same_run_to_the_bit(pristine: Path) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    for spoilt in (False, True):
        folder = fresh(pristine)
        path = folder / "checkpoints" / LAST
        if spoilt:
            state = put(read_checkpoint(path).state, ("optimizer", "state", 5, "momentum_buffer"), torch.zeros(99))
            write_checkpoint(path, state, iteration=4, epoch=0.16, metrics={})
        else:
            path.unlink()
        resumed(folder)
        weights.append(read_checkpoint(folder / "checkpoints" / "iter_00000006.safetensors").weights)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_without_a_good_checkpoint_the_reason_is_that_of_the_last_one(pristine: Path) -> None:
    folder = fresh(pristine)
    for name in (LAST, BEFORE):
        path = folder / "checkpoints" / name
        state = put(read_checkpoint(path).state, ("random",), [1])
        write_checkpoint(path, state, iteration=4, epoch=0.16, metrics={})
    with pytest.raises(CheckpointError, match=rf"none of 2 checkpoints can be read.*\n.*{LAST}: .*its 'random' is not"):
        resumed(folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [BEFORE, LAST]


def test_another_config_is_not_put_down_to_the_checkpoints(pristine: Path) -> None:
    folder = fresh(pristine)
    with pytest.raises(GossamerError, match=rf"{LAST}: does not fit this config\n.*: the state of the optimizer has"):
        resumed(folder, "trainer.optimizer={type: Adam, kwargs: {lr: 0.01}}")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [BEFORE, LAST]


@pytest.mark.parametrize(
    "value", [torch.zeros(0), torch.zeros(3), np.arange(3), "x", [1], {"a": 1}, {1: torch.ones(1)}]
)
def test_averaged_weights_that_are_none_are_refused(value: Any, pristine: Path) -> None:
    path = fresh(pristine) / "checkpoints" / LAST
    state = put(read_checkpoint(path).state, ("ema",), value)
    write_checkpoint(path, state, iteration=4, epoch=0.16, metrics={})
    with pytest.raises(CheckpointError, match=rf"{LAST}: its 'ema' is not a state dict of tensors"):
        read_weights(path)


@pytest.mark.parametrize("command", ["eval", "resume", "export", "analyze"])
@pytest.mark.parametrize("name", ["an array of pointers", "an array of records", "an epoch that is text"])
def test_commands_refuse_a_crafted_checkpoint_in_one_sentence(command: str, name: str, pristine: Path) -> None:
    folder = fresh(pristine)
    for path in (folder / "checkpoints").iterdir():
        spoil(path, UNREADABLE[name][0])
    words = {"export": ["--format", "bitmask", "-o", str(folder / "out")]}.get(command, [])
    result = CliRunner().invoke(app, [command, str(folder), *words])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stderr.startswith("error: ")
    assert ".safetensors" in result.stderr or "checkpoint" in result.stderr
