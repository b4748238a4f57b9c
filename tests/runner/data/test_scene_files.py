from __future__ import annotations

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Coco, Scenes
from gossamer.runner.data import build_dataset, write_coco


def test_scenes_written_as_coco_read_back_the_same(tmp_path):
    source = Scenes(type="scenes", split="test", count=5, size=64, seed=2)
    path = write_coco(source, tmp_path / "scenes")
    scenes = build_dataset(source, task="detection")
    files = build_dataset(Coco(type="coco", path=path, on_error="refuse"), task="detection")
    assert files.notes == []
    assert files.classes == scenes.classes
    assert len(files) == len(scenes) == 5
    for index in range(5):
        (image, target), (expected, truth) = files[index], scenes[index]
        assert torch.equal(image, expected)
        assert all(torch.equal(target[key], truth[key]) for key in truth)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "scenes").touch()
    with pytest.raises(GossamerError, match="scenes: cannot write the scenes"):
        write_coco(Scenes(type="scenes", split="test", count=1), tmp_path / "scenes")
