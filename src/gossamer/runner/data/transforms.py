"""Transforms by the names that torchvision.transforms.v2 has for them, on images and their boxes together.

Makes of bytes the float image that networks take. Knows nothing of files or of the order of images; random numbers
come from torch's generator, which the caller has seeded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from gossamer.errors import GossamerError, nearest
from gossamer.quantities import MAX_COUNT
from gossamer.recipe.wording import found_words
from gossamer.runner.config.schema import Transform
from gossamer.runner.data.boxes import Boxes

# No random numbers, and the same for a stack of images as for each of them.
_FIXED = {"CenterCrop", "ConvertImageDtype", "Grayscale", "Identity", "Normalize", "Pad", "RGB", "Resize", "ToDtype"}
_UNUSABLE = {
    "ConvertBoundingBoxFormat": "boxes stay x1, y1, x2, y2",
    "CutMix": "it works on batches of images with soft labels",
    "FiveCrop": "it makes several images of one",
    "Lambda": "a config holds no functions",
    "LinearTransformation": "a config holds no matrices",
    "MixUp": "it works on batches of images with soft labels",
    "PILToTensor": "images are tensors already; remove it",
    "TenCrop": "it makes several images of one",
    "ToImage": "images are tensors already; remove it",
    "ToPILImage": "images stay tensors; remove it",
    "ToPureTensor": "boxes could no longer follow; remove it",
    "ToTensor": "images are tensors already and become floats by themselves; remove it",
    "Transform": "it does nothing",
    "UniformTemporalSubsample": "it is for videos",
}


_ARGUMENTS: TypeAdapter[dict[str, dict[str, Any] | None]] = TypeAdapter(dict[str, dict[str, Any] | None])


class Pipeline:
    """What a config's `transforms` do to an image; without any, bytes become floats from 0 to 1.

    An image is varied, by all that may be random, and then settled by the rest, which can be done to a whole stack.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        named = [_name_and_arguments(each, f"transforms[{place}]") for place, each in enumerate(transforms)]
        steps = [_built(name, arguments, f"transforms[{place}]") for place, (name, arguments) in enumerate(named)]
        names = [name for name, _ in named]
        place = names.index("Normalize") if "Normalize" in names else len(names)
        steps.insert(place, _to_floats)
        names.insert(place, "ToDtype")
        varied = max((place + 1 for place, name in enumerate(names) if name not in _FIXED), default=0)
        self._varied, self._settled = steps[:varied], steps[varied:]

    @property
    def fixed(self) -> bool:
        """Whether nothing is random."""
        return not self._varied

    def vary(self, image: Tensor) -> Tensor:
        """An image after all transforms that may be random."""
        return _through(self._varied, image)

    def settle(self, images: Tensor) -> Tensor:
        """One varied image or a stack of them after the rest: floats."""
        return _floats(_through(self._settled, images)).contiguous()

    def with_boxes(self, image: Tensor, boxes: Boxes) -> tuple[Tensor, Boxes]:
        """A float image, and the boxes that are left of those given, inside it."""
        steps = [*self._varied, *self._settled]
        if steps == [_to_floats]:
            return _floats(image).contiguous(), boxes
        from torchvision import tv_tensors

        size = image.shape[-2], image.shape[-1]
        boxes_of: Any = tv_tensors.BoundingBoxes  # its overloads leave out the way of its documentation
        # The flag travels beside the label, so that whatever removes a box removes both.
        value: Any = (
            tv_tensors.Image(image),
            {
                "boxes": boxes_of(boxes.corners, format="XYXY", canvas_size=size),
                "labels": torch.stack([boxes.labels, boxes.crowd.long()], dim=1),
            },
        )
        for step in steps:
            value = step(value)
        image = _floats(value[0]).contiguous()
        return image, _inside(value[1]["boxes"], value[1]["labels"], image)


def _through(steps: list[Callable[[Any], Any]], image: Tensor) -> Tensor:
    if not steps:
        return image
    for step in steps:  # a tensor alone is an image to torchvision, and costs less than one that says so
        image = step(image)
    return image


def _to_floats(value: Any) -> Any:
    """A step like those of torchvision."""
    if type(value) is Tensor:
        return _floats(value)
    from torchvision import tv_tensors

    if isinstance(value, Tensor):
        return tv_tensors.Image(_floats(value))
    image, truth = value
    return tv_tensors.Image(_floats(image)), truth


def _floats(image: Tensor) -> Tensor:
    """A plain tensor of floats; integers become shares of their greatest value."""
    image = image.as_subclass(Tensor)
    if image.dtype == torch.float32:
        return image
    if image.is_floating_point():
        return image.float()
    return image.to(torch.float32).div_(torch.iinfo(image.dtype).max)


def _inside(corners: Tensor, labels: Tensor, image: Tensor) -> Boxes:
    """Clamped boxes; those of less than a pixel are gone, as a crop or a rotation leaves them behind."""
    height, width = image.shape[-2:]
    corners = corners.as_subclass(Tensor).float()
    corners = torch.minimum(corners.clamp(min=0), torch.tensor([width, height, width, height]))
    keep = ((corners[:, 2:] - corners[:, :2]) >= 1).all(dim=1)
    return Boxes(corners, labels[:, 0], labels[:, 1] != 0).kept(keep)


def _name_and_arguments(transform: Transform, place: str) -> tuple[str, dict[str, Any]]:
    if isinstance(transform, str):
        return transform, {}
    try:
        transform = _ARGUMENTS.validate_python(transform)  # those inside another transform are not checked before
    except ValidationError:
        raise GossamerError(f"{place}: expected a name, or a name with its arguments, found {transform!r}") from None
    if len(transform) != 1:
        raise GossamerError(f"{place}: expected one name with its arguments, found {', '.join(transform) or 'none'}")
    ((name, arguments),) = transform.items()
    return name, arguments or {}


def _built(name: str, arguments: dict[str, Any], place: str) -> Callable[[Any], Any]:
    try:
        from torchvision.transforms import v2
    except ImportError:
        raise GossamerError("transforms need torchvision; install it with: pip install 'gossamer[vision]'") from None

    if name in _UNUSABLE:
        raise GossamerError(f"{place}: {name} cannot be used here: {_UNUSABLE[name]}")
    known = {
        key for key, value in vars(v2).items() if isinstance(value, type) and issubclass(value, v2.Transform)
    } - _UNUSABLE.keys()
    if name not in known:
        raise GossamerError(f"{place}: torchvision.transforms.v2 has no {name!r}{nearest(name, known)}")
    builder = getattr(v2, name)
    parameters = list(inspect.signature(builder).parameters)
    for key in arguments:
        if key not in parameters:
            near = nearest(key, parameters) or f"; it takes {', '.join(parameters) or 'none'}"
            raise GossamerError(f"{place}: {name} has no argument {key!r}{near}")
    values = {key: _argument(key, value, f"{place}.{name}") for key, value in arguments.items()}
    try:
        return builder(**values)
    except (TypeError, ValueError, AttributeError, RuntimeError) as problem:
        raise GossamerError(f"{place}: {name}: {problem}") from None


def _check_numbers(value: Any, place: str) -> None:
    """Raise for a number that overflows inside a transform."""
    if isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_numbers(inner, place)
    elif isinstance(value, int | float) and not abs(value) <= MAX_COUNT:
        limits = f"between {-MAX_COUNT:g} and {MAX_COUNT:g}"
        raise GossamerError(f"{place}: expected numbers {limits}, found {found_words(value)}")


def _argument(key: str, value: Any, place: str) -> Any:
    """The object that a text in a config stands for."""
    from torchvision.transforms import v2

    if key == "transforms" and isinstance(value, list):
        inner = cast("list[Transform]", value)
        return [
            _built(*_name_and_arguments(each, f"{place}[{number}]"), f"{place}[{number}]")
            for number, each in enumerate(inner)
        ]
    if not isinstance(value, str):
        _check_numbers(value, f"{place}: {key}")
        return value
    choices: dict[str, Any] = {}
    if key == "interpolation":
        choices = {mode.value: mode for mode in v2.InterpolationMode}
    elif key == "policy":
        choices = {policy.value: policy for policy in v2.AutoAugmentPolicy}
    elif key == "dtype":
        choices = {"float32": torch.float32, "uint8": torch.uint8}
    if not choices:
        return value
    if value.lower() not in choices:
        known = ", ".join(choices)
        raise GossamerError(f"{place}: {key} {value!r} is none of {known}{nearest(value, choices)}")
    return choices[value.lower()]
