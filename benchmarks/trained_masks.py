"""Masks of trained networks in `gossamer.runtime`, beside random masks with the same share of zeros in each layer.

The weights are those of a ResNet-50 trained on ImageNet and of the MiniLM sentence encoder, pruned by magnitude: with
90 % zeros in every layer, and 90 % of all weights together. The second leaves the small early layers denser, which do
most of the work; the share of MACs that remains is shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.measuring import Row, Watch, ratio_quartiles, rounds_of
from benchmarks.runtime import Encoder, Inputs, exported, onnxruntime_call, onnxruntime_session
from gossamer import runtime

ROUNDS = 15
SHARE = 0.9
_KERAS = {"branch1": "downsample.0", "branch2a": "conv1", "branch2b": "conv2", "branch2c": "conv3"}


def trained_masks(watch: Watch, folder: Path | None) -> Iterator[Row]:
    """One thread, single inputs."""
    if folder is None:
        raise FileNotFoundError("runtime-trained: needs trained weights; --weights DIR names their folder")
    networks: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
        "model.json": lambda: (keras_resnet50(folder), (torch.randn(1, 3, 224, 224),)),
        "model.safetensors": lambda: (
            _minilm(folder),
            (torch.randint(30000, (1, 128)), torch.ones(1, 128, dtype=torch.long)),
        ),
    }
    found = [name for name in networks if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"runtime-trained: no {' and no '.join(networks)} in '{folder}'")
    for name in found:
        torch.manual_seed(0)
        model, inputs = networks[name]()
        title = "MiniLM encoder, 128 tokens" if name.endswith("safetensors") else "ResNet-50, 224²"
        yield from _rows(watch, title, model.eval(), inputs)


def keras_resnet50(folder: Path) -> nn.Module:
    """torchvision's ResNet-50 with the convolutions and the last layer of a Keras network in TensorFlow.js's format."""
    groups = json.loads((folder / "model.json").read_text())["weightsManifest"]
    arrays: dict[str, np.ndarray] = {}
    for group in groups:
        content, start = b"".join((folder / path).read_bytes() for path in group["paths"]), 0
        for weight in group["weights"]:
            count = int(np.prod(weight["shape"]))
            arrays[weight["name"]] = np.frombuffer(content, np.float32, count, start).reshape(weight["shape"])
            start += 4 * count
    model = torchvision.models.resnet50()
    state = model.state_dict()
    for name, array in arrays.items():
        layer, part = name.split("/")
        if part != "kernel":
            continue
        if layer.startswith("res"):  # such as res2a_branch2b
            block, branch = layer[3:].split("_")
            target = f"layer{int(block[0]) - 1}.{ord(block[1]) - ord('a')}.{_KERAS[branch]}.weight"
        else:
            target = {"conv1": "conv1.weight", "fc1000": "fc.weight"}[layer]
        ordered = array.T if array.ndim == 2 else array.transpose(3, 2, 0, 1)
        state[target].copy_(torch.from_numpy(np.ascontiguousarray(ordered)))
    return model


def _minilm(folder: Path) -> nn.Module:
    model = Encoder(384, 6)
    state = {name: value for name, value in load_file(folder / "model.safetensors").items() if "pooler" not in name}
    model.bert.load_state_dict({name.removeprefix("bert."): value for name, value in state.items()}, strict=False)
    return model


def _rows(watch: Watch, title: str, dense: nn.Module, inputs: Inputs) -> Iterator[Row]:
    layers = _layers(dense)
    positions = _positions(dense, inputs, layers)
    everything = torch.cat([layer.weight.detach().abs().flatten() for layer in layers.values()])
    threshold = everything.kthvalue(int(SHARE * everything.numel())).values
    ways = {
        "in every layer": {name: _smallest(layer.weight) for name, layer in layers.items()},
        "of all weights": {name: layer.weight.detach().abs() <= threshold for name, layer in layers.items()},
    }
    with TemporaryDirectory() as temporary:
        peer = onnxruntime_call(onnxruntime_session(exported(dense, inputs, Path(temporary)), 1), inputs)
        for way, zeros in ways.items():
            shuffled = {name: _shuffled(mask) for name, mask in zeros.items()}
            engines = [runtime.compile(_pruned(dense, masks), inputs, threads=1) for masks in (zeros, shuffled)]
            kept = sum(float((~mask).sum()) * positions[name] for name, mask in zeros.items())
            total = sum(mask.numel() * positions[name] for name, mask in zeros.items())
            yield _row(watch, f"{title}, {SHARE:.0%} zeros {way}, trained", engines, inputs, peer, kept / total)


def _row(
    watch: Watch, title: str, engines: list[runtime.Engine], inputs: Inputs, peer: Callable[[], object], macs: float
) -> Row:
    trained, random = engines
    contenders: dict[str, Callable[[], object]] = {
        "trained": lambda: trained(*inputs),
        "random": lambda: random(*inputs),
        "onnxruntime": peer,
    }
    seconds = rounds_of(contenders, watch, title, ROUNDS, warm_up=2)
    found = {name: statistics.median(values) for name, values in seconds.items()}
    return Row(
        title,
        1e3 * found["trained"],
        1e3 * found["random"],
        "ms",
        1.1,
        note=f"peer: random masks with as many zeros in each layer; {found['onnxruntime'] / found['trained']:.2f}× the "
        f"speed of dense onnxruntime; {macs:.1%} of the MACs of these layers remain",
        spread=ratio_quartiles(seconds["trained"], seconds["random"]),
    )


def _layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """The layers to prune: all but the first and the last of a CNN."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    names = list(found)
    chosen = names[1:-1] if isinstance(found[names[0]], nn.Conv2d) else names
    return {name: found[name] for name in chosen}


def _positions(model: nn.Module, inputs: Inputs, layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """How often a call uses each weight of a layer: pixels or tokens of its output."""
    found: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> None:
            found[name] = output.numel() // output.shape[1 if isinstance(module, nn.Conv2d) else -1]

        return hook

    handles = [layer.register_forward_hook(count(name)) for name, layer in layers.items()]
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return found


def _smallest(weight: Tensor) -> Tensor:
    values = weight.detach().abs()
    return values <= values.flatten().kthvalue(int(SHARE * values.numel())).values


def _shuffled(mask: Tensor) -> Tensor:
    return mask.flatten()[torch.randperm(mask.numel())].reshape(mask.shape)


def _pruned(model: nn.Module, zeros: Mapping[str, Tensor]) -> nn.Module:
    model = deepcopy(model)
    for name, mask in zeros.items():
        layer: Any = model.get_submodule(name)
        layer.weight.data.masked_fill_(mask, 0.0)
    return model
