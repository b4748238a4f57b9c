from __future__ import annotations

import pickle

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner.data.examples import Boxes
from gossamer.runner.data.transforms import Pipeline


def image(height=8, width=12):
    return torch.arange(3 * height * width, dtype=torch.uint8).reshape(3, height, width)


def boxes(*corners):
    count = len(corners)
    flags = torch.arange(count) % 2 == 1
    return Boxes(torch.tensor(corners, dtype=torch.float32).reshape(-1, 4), torch.arange(1, count + 1), flags)


def settled(pipeline, picture):
    return pipeline.apply_fixed(pipeline.apply_random(picture))


def test_bytes_become_floats_from_0_to_1_without_any_transform():
    assert torch.equal(settled(Pipeline([]), image()), image() / 255)
    assert Pipeline([]).apply_with_boxes(image(), boxes((1, 2, 3, 4)))[0].dtype == torch.float32


@pytest.mark.parametrize("behind", [[], ["RandomVerticalFlip"]])
def test_normalize_is_given_floats(behind):
    pipeline = Pipeline([{"Normalize": {"mean": [0.5] * 3, "std": [0.25] * 3}}, *behind])
    sides = {tuple((image() / 255 - 0.5).div(0.25).flip(dims).flatten().tolist()) for dims in ((), (1,))}
    assert tuple(settled(pipeline, image()).flatten().tolist()) in sides


def test_a_float_image_made_by_the_config_is_left_alone():
    pipeline = Pipeline([{"ToDtype": {"dtype": "float32", "scale": True}}])
    assert torch.allclose(settled(pipeline, image()), image() / 255)


def test_boxes_follow_a_flip():
    flipped, moved = Pipeline([{"RandomHorizontalFlip": {"p": 1}}]).apply_with_boxes(image(), boxes((1, 2, 4, 6)))
    assert torch.equal(flipped, image().flip(-1) / 255)
    assert moved.corners.tolist() == [[8, 2, 11, 6]]


def test_boxes_follow_a_resize():
    resized, moved = Pipeline([{"Resize": {"size": [16, 24]}}]).apply_with_boxes(image(), boxes((1, 2, 4, 6)))
    assert resized.shape == (3, 16, 24)
    assert moved.corners.tolist() == [[2, 4, 8, 12]]


@pytest.mark.parametrize("behind", [[], ["SanitizeBoundingBoxes"], ["ClampBoundingBoxes"]])
def test_a_crop_cuts_boxes_and_removes_those_outside_with_their_labels_and_flags(behind):
    given = boxes((0, 0, 2, 2), (2, 1, 6, 5), (5, 3, 7, 4), (5, 2, 12, 8))
    cut, left = Pipeline([{"CenterCrop": {"size": [4, 4]}}, *behind]).apply_with_boxes(image(), given)
    assert cut.shape == (3, 4, 4)
    assert left.corners.tolist() == [[0, 0, 2, 3], [1, 1, 3, 2], [1, 0, 4, 4]]
    assert left.labels.tolist() == [2, 3, 4]
    assert left.crowd.tolist() == [True, False, True]


def test_an_image_may_have_no_boxes():
    _, left = Pipeline(["RandomHorizontalFlip", {"RandomResizedCrop": {"size": 4}}]).apply_with_boxes(image(), boxes())
    assert left.corners.shape == (0, 4)


def test_boxes_survive_the_crop_that_is_meant_for_them():
    torch.manual_seed(0)
    pipeline = Pipeline(["RandomIoUCrop", {"Resize": {"size": [8, 12]}}])
    for _ in range(20):
        _, left = pipeline.apply_with_boxes(image(), boxes((0, 0, 5, 5), (6, 3, 12, 8)))
        assert ((left.corners[:, 2:] - left.corners[:, :2]) >= 1).all()
        assert (left.corners >= 0).all()
        assert (left.corners <= torch.tensor([12, 8, 12, 8])).all()


def test_only_what_may_be_random_makes_a_pipeline_vary():
    fixed = [{"Resize": {"size": 4}}, {"CenterCrop": {"size": 4}}, {"Normalize": {"mean": [0.0], "std": [1.0]}}]
    assert Pipeline(fixed).is_fixed
    assert not Pipeline([*fixed, "RandomErasing"]).is_fixed


def test_texts_stand_for_modes_policies_and_nested_transforms():
    pipeline = Pipeline(
        [
            {"Resize": {"size": [4, 4], "interpolation": "bicubic"}},
            {"AutoAugment": {"policy": "cifar10"}},
            {"RandomApply": {"transforms": ["RandomHorizontalFlip", {"ColorJitter": {"brightness": 0.2}}], "p": 0.5}},
            {"RandomErasing": None},
        ]
    )
    assert settled(pickle.loads(pickle.dumps(pipeline)), image()).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            "RandomHorizontalFlp",
            r"transforms\[0\]: torchvision.transforms.v2 has no .*; nearest: 'RandomHorizontalFlip'",
        ),
        ({"RandomCrop": {"sise": 3}}, r"transforms\[0\]: RandomCrop has no argument 'sise'; nearest: 'size'"),
        ({"RandomCrop": {}}, r"transforms\[0\]\.RandomCrop: .*missing .*'size'"),
        ({"RandomHorizontalFlip": {"p": 7}}, r"transforms\[0\]\.RandomHorizontalFlip: "),
        (
            {"Resize": {"size": 3, "interpolation": "bilinearr"}},
            r"Resize\.interpolation: expected one of .*, found 'bilinearr'; nearest: 'bilinear'",
        ),
        ("ToTensor", "images are already tensors"),
        ("MixUp", r"transforms\[0\]: MixUp cannot be used here"),
        ("functional", "has no 'functional'"),
        ({"Resize": {"size": 3}, "RandomCrop": {"size": 3}}, "expected a name, or one name with its arguments"),
        ({"RandomApply": {"transforms": ["Flip"]}}, r"transforms\[0\]\.RandomApply\.transforms\[0\]: .* has no 'Flip'"),
    ],
)
def test_a_transform_that_does_not_exist_is_one_message(transform, message):
    with pytest.raises(GossamerError, match=message):
        Pipeline([transform])
