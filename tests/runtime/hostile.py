"""Loads engine files that were changed to do harm, and calls what loads: run in a process of its own, which must not
crash, hang, or raise anything but `GossamerError`.

`python -m tests.runtime.hostile FOLDER SEED COUNT` prints one line for each file before it is loaded.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.io import bytes_of, header_of, read_header, write_sealed
from gossamer.runtime.file import KIND, VERSION

VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 2**15, 2**24, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e300, True, False),
    *(None, "", "x", "s0", "conv2d", "../../etc/passwd", "\0", [], {}, [[]], [0, 0], [-1, -1], [2**24, 2**24]),
    *({"ref": "nope"}, {"ref": ""}, {"ref": 3}, {"map": {}}, {"dtype": "F64"}, {"dtype": "nope"}, {"float": "nan"}),
    *({"float": "inf"}, {"float": "-inf"}, {"torch": "cpu"}, {"torch": "cuda"}, {"a": 1, "b": 2}, "relu6", "gelu"),
]
Graph = dict[str, Any]
Data = dict[str, torch.Tensor]


def read(path: Path) -> tuple[Graph, Data, dict[str, str]]:
    with path.open("rb") as file:
        metadata, parts = read_header(file, KIND, VERSION)
        data = {
            name: torch.frombuffer(bytearray(file.read(part.end - part.start)), dtype=part.dtype).reshape(part.shape)
            for name, part in parts.items()
        }
    graph = json.loads(metadata.pop("graph"))
    return graph, data, {key: value for key, value in metadata.items() if key not in ("digest", "content")}


def write(path: Path, graph: Graph, data: Data, metadata: dict[str, str]) -> None:
    """A file with valid digests."""
    tensors = {name: tensor.contiguous() for name, tensor in data.items()}
    header = header_of(
        metadata | {"graph": json.dumps(graph)},
        [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()],
    )
    with path.open("wb") as file:
        write_sealed(file, header, (bytes_of(tensor) for tensor in tensors.values()))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def change_value(graph: Graph, data: Data, rng: random.Random) -> str:
    """Another value anywhere; numbers that fit by their type more often than not."""
    holder, key = rng.choice(list(places(graph)) or [(graph, "nodes")])
    before = holder.get(key) if isinstance(holder, dict) else holder[key]
    if rng.random() < 0.5:
        same = [value for value in VALUES if type(value) is type(before)]
        if isinstance(before, str):
            same += [own[name] for own, name in places(graph) if isinstance(own[name], str)] + list(data)
        if isinstance(before, int):
            same += [before + 1, before - 1, 2 * before, 16 * before]
        holder[key] = rng.choice(same or VALUES)
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    return f"{key!r}: {str(before)[:60]!r} -> {str(holder[key])[:60]!r}"


def move(graph: Graph, data: Data, rng: random.Random) -> str:
    """A value or node left out, doubled, or in the place of another one."""
    lists = [place for place in places(graph) if isinstance(place[0], list)]
    if not lists:
        return "nothing"
    holder, key = rng.choice(lists)
    kind = rng.choice(["drop", "double", "swap"])
    if kind == "drop":
        del holder[key]
    elif kind == "double":
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        other = rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    return f"{kind} {key}"


def change_tensor(graph: Graph, data: Data, rng: random.Random) -> str:
    """A tensor of another size, type or content, or none."""
    if not data:
        return "nothing"
    name = rng.choice(sorted(data))
    before, kind = data[name], rng.choice(["drop", "short", "long", "type", "flat", "bytes", "nan", "empty"])
    if kind == "drop":
        del data[name]
    elif kind in ("short", "long", "empty"):
        flat = before.flatten()
        data[name] = {"short": flat[:-1], "long": torch.cat([flat, flat]), "empty": flat[:0]}[kind]
    elif kind == "type":
        data[name] = before.to(rng.choice([torch.float64, torch.int64, torch.uint8, torch.bool, torch.float16]))
    elif kind == "flat":
        data[name] = before.reshape(1, -1)
    elif kind == "nan" and before.is_floating_point():
        data[name] = torch.full_like(before, float("nan"))
    elif before.numel():
        noise = np.frombuffer(rng.randbytes(before.numel() * before.element_size()), np.uint8).copy()
        data[name] = torch.from_numpy(noise).view(before.dtype).reshape(before.shape)
    return f"{name}: {kind}"


Change = Callable[[Graph, Data, random.Random], str]
CHANGES: list[Change] = [change_value, change_value, change_value, move, change_tensor]


def attempt(path: Path, example: list[torch.Tensor]) -> str:
    """What loading and calling a file comes to."""
    try:
        engine = runtime.load(path, threads=1)
    except GossamerError:
        return "refused"
    try:
        engine.layers()
        engine(*example)
    except GossamerError:
        return "refused in the call"
    return "runs"


def main(folder: Path, seed: int, count: int) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    rng, found = random.Random(seed), dict[str, int]()
    sources = sorted(folder.glob("*.gossamer"))
    for number in range(count):
        source = sources[number % len(sources)]
        graph, data, metadata = read(source)
        example = torch.load(source.with_suffix(".pt"))
        what = [rng.choice(CHANGES)(graph, data, rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        sys.stdout.write(f"{number} {source.name} {what}\n")
        sys.stdout.flush()
        try:
            write(folder / "changed", graph, data, metadata)
        except (GossamerError, ValueError, TypeError):
            continue  # JSON does not have it
        result = attempt(folder / "changed", example)
        found[result] = found.get(result, 0) + 1
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
