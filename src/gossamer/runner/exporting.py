"""The model that comes out of a run, in files that other programs take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.files import whole
from gossamer.runner.tasks import Task

NAME = "model"
FORMATS = ("safetensors", "onnx")


def write_model(model: nn.Module, task: Task, image: Tensor, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write `model.safetensors` and `model.onnx`, as asked; a detector's networks are a file each where it has several.

    `image` (1, C, H, W) is an example of what the model takes.
    """
    for name in formats:
        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise GossamerError(f"--format: there is no '{name}'{nearest(name, FORMATS)}; there are {known}")
    was_training = model.training
    model.eval()
    try:
        written = [write_weights(model, folder / f"{NAME}.safetensors")] if "safetensors" in formats else []
        return written + (write_onnx(model, task, image, folder) if "onnx" in formats else [])
    finally:
        model.train(was_training)


def write_weights(model: nn.Module, path: Path) -> Path:
    """The state dict alone."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            save_file(state, part, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GossamerError(
            f"{path}: cannot be written: {reason}; make room, and write it by gossamer export"
        ) from error
    return path


def write_onnx(model: nn.Module, task: Task, image: Tensor, folder: Path) -> list[Path]:
    """One file for each network: what torch.fx follows, without post-processing."""
    from gossamer.export import to_onnx

    with torch.no_grad():
        networks = task.networks(model, image)
    written: list[Path] = []
    for name, network in networks.items():
        path = folder / (f"{NAME}.onnx" if len(networks) == 1 else f"{NAME}-{name}.onnx")
        written.append(to_onnx(network.module, path, network.inputs, output_names=network.outputs))
    return written
