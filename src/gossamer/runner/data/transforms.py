"""Transforms of torchvision.transforms.v2 by name, applied to an image and its boxes together.

The result is a float image. Random numbers come from torch's default generator, which the caller seeds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError, Problem, format_value, nearest, within
from gossamer.quantities import MAX_COUNT
from gossamer.runner.config.schema import Transform
from gossamer.runner.data.examples import Boxes

# Not random, and the same for a stack of images as for each of them.
_FIXED = {"CenterCrop", "ConvertImageDtype", "Grayscale", "Identity", "Normalize", "Pad", "RGB", "Resize", "ToDtype"}
_UNUSABLE = {
    "ConvertBoundingBoxFormat": "boxes stay x1, y1, x2, y2",
    "CutMix": "batches with soft labels are not supported",
    "FiveCrop": "several images from one are not supported",
    "Lambda": "a config cannot hold functions",
    "MixUp": "batches with soft labels are not supported",
    "TenCrop": "several images from one are not supported",
    "ToImage": "images are already tensors; remove it",
    "ToPILImage": "images stay tensors; remove it",
    "ToPureTensor": "later transforms would not move the boxes; remove it",
    "ToTensor": "images are already tensors and become floats automatically; remove it",
}


class Pipeline:
    """The `transforms` of a config; without any, bytes become floats from 0 to 1.

    The random part ends with the last transform that may be random. The fixed part after it can run on a whole stack.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        names: list[str] = []
        steps: list[Callable[[Any], Any]] = []
        for index, transform in enumerate(transforms):
            with within("transforms", index):
                name, arguments = _name_and_arguments(transform)
                names.append(name)
                steps.append(_build(name, arguments))
        position = names.index("Normalize") if "Normalize" in names else len(names)
        steps.insert(position, _floats)
        names.insert(position, "ToDtype")
        end = max((index + 1 for index, name in enumerate(names) if name not in _FIXED), default=0)
        self._random, self._fixed = steps[:end], steps[end:]

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is random."""
        return not self._random

    def apply_random(self, image: Tensor) -> Tensor:
        """An image after the random part."""
        return _apply(self._random, image)

    def apply_fixed(self, images: Tensor) -> Tensor:
        """An image, or a stack of them, after the fixed part: floats."""
        return _floats(_apply(self._fixed, images)).contiguous()

    def apply_with_boxes(self, image: Tensor, boxes: Boxes) -> tuple[Tensor, Boxes]:
        """A float image after all transforms, and the boxes that are left inside it."""
        steps = [*self._random, *self._fixed]
        if steps == [_floats]:
            return _floats(image).contiguous(), boxes
        from torchvision import tv_tensors

        size = image.shape[-2], image.shape[-1]
        bounding_boxes: Any = tv_tensors.BoundingBoxes  # its type annotations lack the documented signature
        # The crowd flag is a column of the labels, so that a transform that removes a box removes both.
        value: Any = (
            tv_tensors.Image(image),
            {
                "boxes": bounding_boxes(boxes.corners, format="XYXY", canvas_size=size),
                "labels": torch.stack([boxes.labels, boxes.crowd.long()], dim=1),
            },
        )
        for step in steps:
            value = (tv_tensors.Image(_floats(value[0])), value[1]) if step is _floats else step(value)
        image = _floats(value[0]).contiguous()
        return image, _clamped(value[1]["boxes"], value[1]["labels"], image)


def _apply(steps: list[Callable[[Any], Any]], image: Tensor) -> Tensor:
    for step in steps:  # torchvision takes a plain tensor for an image, which is faster than tv_tensors.Image
        image = step(image)
    return image


def _floats(image: Tensor) -> Tensor:
    """A plain float tensor; integers are divided by their largest value."""
    image = image.as_subclass(Tensor)
    if image.dtype == torch.float32:
        return image
    if image.is_floating_point():
        return image.float()
    return image.to(torch.float32).div_(torch.iinfo(image.dtype).max)


def _clamped(corners: Tensor, labels: Tensor, image: Tensor) -> Boxes:
    """Boxes clamped to the image, without those smaller than a pixel, which crops and rotations leave behind."""
    height, width = image.shape[-2:]
    corners = corners.as_subclass(Tensor).float()
    corners = torch.minimum(corners.clamp(min=0), torch.tensor([width, height, width, height]))
    keep = ((corners[:, 2:] - corners[:, :2]) >= 1).all(dim=1)
    return Boxes(corners, labels[:, 0], labels[:, 1] != 0)[keep]


def _name_and_arguments(transform: Any) -> tuple[str, dict[str, Any]]:
    """The schema does not check transforms inside another one, so that anything can come here."""
    if isinstance(transform, str):
        return transform, {}
    if isinstance(transform, dict) and len(cast("dict[str, Any]", transform)) == 1:
        ((name, arguments),) = cast("dict[str, Any]", transform).items()
        if arguments is None or isinstance(arguments, dict):
            return name, cast("dict[str, Any]", arguments or {})
    raise GossamerError(
        f"expected a name, or one name with its arguments, found {format_value(cast(object, transform))}"
    )


def _build(name: str, arguments: dict[str, Any]) -> Callable[[Any], Any]:
    try:
        from torchvision.transforms import v2
    except ImportError:
        raise GossamerError("transforms need torchvision; install it with: pip install 'gossamer[vision]'") from None

    if name in _UNUSABLE:
        raise GossamerError(f"{name} cannot be used here: {_UNUSABLE[name]}")
    known = {key for key, value in vars(v2).items() if isinstance(value, type) and issubclass(value, v2.Transform)}
    if name not in known:
        raise GossamerError(f"torchvision.transforms.v2 has no {name!r}{nearest(name, known)}")
    transform = getattr(v2, name)
    parameters = list(inspect.signature(transform).parameters)
    for key in arguments:
        if key not in parameters:
            raise GossamerError(f"{name} has no argument {key!r}{nearest(key, parameters)}")
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        with within(name, key):
            values[key] = _argument(key, value)
    try:
        return transform(**values)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise GossamerError(Problem(str(error), (name,))) from None


def _argument(key: str, value: Any) -> Any:
    """The argument of a transform that a value in a config means."""
    from torchvision.transforms import v2

    if key == "transforms" and isinstance(value, list):
        inner: list[Callable[[Any], Any]] = []
        for index, transform in enumerate(cast("list[Transform]", value)):
            with within(index):
                inner.append(_build(*_name_and_arguments(transform)))
        return inner
    if not isinstance(value, str):
        _check_numbers(value)
        return value
    choices: dict[str, Any] = {
        "interpolation": {mode.value: mode for mode in v2.InterpolationMode},
        "policy": {policy.value: policy for policy in v2.AutoAugmentPolicy},
        "dtype": {"float32": torch.float32, "uint8": torch.uint8},
    }.get(key, {value: value})
    if value not in choices:
        raise GossamerError(f"expected one of {', '.join(choices)}, found {value!r}{nearest(value, choices)}")
    return choices[value]


def _check_numbers(value: Any) -> None:
    """Raise for a number that would overflow inside a transform."""
    if isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_numbers(inner)
    elif isinstance(value, int | float) and not abs(value) <= MAX_COUNT:
        limits = f"between {-MAX_COUNT:g} and {MAX_COUNT:g}"
        raise GossamerError(f"expected numbers {limits}, found {format_value(value)}")
