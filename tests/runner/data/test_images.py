from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from gossamer.runner.data.examples import ImageFileError, read_image
from tests.runner.data.files import noisy_picture, picture, truncated_picture


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I"])
def test_every_kind_of_image_comes_out_as_rgb_bytes(tmp_path, mode):
    path = tmp_path / ("a.tif" if mode in ("CMYK", "I") else "a.png")
    if mode == "I;16":
        Image.fromarray(np.full((4, 6), 40000, np.uint16)).save(path)
    elif mode == "I":
        Image.fromarray(np.full((4, 6), 40000, np.int32)).save(path)
    else:
        Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode).save(path)
    pixels = read_image(str(path))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 4, 6)
    assert (pixels == (40000 // 256 if mode.startswith("I") else 255)).all()


def test_a_palette_with_transparency_keeps_its_colours(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 100, 50, 1, 2, 3])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "a.png", transparency=bytes([128, 255]))
    assert read_image(str(tmp_path / "a.png")).tolist() == [[[200, 1]], [[100, 2]], [[50, 3]]]


def test_a_float_image_is_a_share_of_white(tmp_path):
    Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)).save(tmp_path / "a.tif")
    assert read_image(str(tmp_path / "a.tif"))[0, 0].tolist() == [0, 127, 255]


def test_an_image_is_turned_as_its_exif_orientation_says(tmp_path):
    image = Image.new("RGB", (30, 10))
    image.paste((255, 0, 0), (0, 0, 15, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter, clockwise
    image.save(tmp_path / "a.jpg", exif=exif)
    pixels = read_image(str(tmp_path / "a.jpg"))
    assert pixels.shape == (3, 30, 10)
    assert pixels[0, 2, 5] > 200
    assert pixels[0, 27, 5] < 50


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_truncated_image_is_one_message(tmp_path, suffix):
    path = truncated_picture(tmp_path / f"a.{suffix}")
    with pytest.raises(ImageFileError, match=rf"a\.{suffix}: cannot read the image \(.*truncated"):
        read_image(str(path))


def test_damage_anywhere_in_a_file_ends_in_an_image_or_one_kind_of_error(tmp_path):
    random = np.random.default_rng(0)
    outcomes = set()
    for suffix in ("png", "jpg", "tif", "bmp", "gif"):
        whole = noisy_picture(tmp_path / f"a.{suffix}", size=16).read_bytes()
        for number in range(60):
            damaged = bytearray(whole)
            for place in random.integers(0, len(whole), 4):
                damaged[place] = random.integers(256)
            end = len(whole) if number % 2 else random.integers(len(whole))
            (tmp_path / "b").write_bytes(damaged[:end])
            try:
                read_image(str(tmp_path / "b"))
                outcomes.add("image")
            except ImageFileError:
                outcomes.add("error")
    assert outcomes == {"image", "error"}


def test_what_is_no_image_or_not_there_is_named(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    (tmp_path / "empty.png").touch()
    with pytest.raises(ImageFileError, match=r"a\.png: cannot read the image \(unknown image format\)"):
        read_image(str(tmp_path / "a.png"))
    with pytest.raises(ImageFileError, match=r"empty\.png: cannot read the image"):
        read_image(str(tmp_path / "empty.png"))
    with pytest.raises(ImageFileError, match=r"b\.png: no such image"):
        read_image(str(tmp_path / "b.png"))
    with pytest.raises(ImageFileError, match="cannot read the image"):
        read_image(str(tmp_path))


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(ImageFileError, match=r"cannot read the image \(.*decompression bomb"):
        read_image(str(picture(tmp_path / "a.png")))
