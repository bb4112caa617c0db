from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from bayesify.data import ImageFolder


def paint(path, colour, size=(6, 4), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)
    return path


@pytest.fixture
def root(tmp_path):
    paint(tmp_path / "dog" / "b.png", (255, 0, 0))
    paint(tmp_path / "dog" / "deeper" / "a.PNG", (0, 255, 0))
    paint(tmp_path / "cat" / "a.bmp", (0, 0, 255), size=(3, 9))
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_classes_are_the_sorted_folders_and_images_one_size(root):
    data = ImageFolder(root, (5, 7))
    assert data.classes == ("cat", "dog")
    assert data.labels == [0, 1, 1]
    for (image, label), colour in zip(data, [(0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)], strict=True):
        assert isinstance(label, int)
        assert torch.equal(image, torch.tensor(colour)[:, None, None].expand(3, 5, 7))


def test_grey_and_upright(tmp_path):
    pixels = np.array([[0, 255]], dtype=np.uint8).repeat(8, 0).repeat(4, 1)  # left black
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees anticlockwise
    (tmp_path / "c").mkdir()
    Image.fromarray(pixels).save(tmp_path / "c" / "a.png", exif=exif)
    image = ImageFolder(tmp_path, 8, mode="L")[0][0]
    assert torch.equal(image[0], torch.tensor([0.0] * 4 + [1.0] * 4)[:, None].expand(8, 8))


def test_files_are_read_only_when_asked_for(root):
    (root / "dog" / "c.jpg").write_bytes(b"\xff\xd8 half")
    data = ImageFolder(root, 4)
    assert data[0][1] == 0
    with pytest.raises(ValueError, match=r"c\.jpg cannot be read as an image"):
        data[[p.name for p in data.files].index("c.jpg")]


def test_only_the_listed_formats_are_tried(root):
    Image.new("RGB", (4, 4)).save(root / "dog" / "c.png", format="PPM")
    data = ImageFolder(root, 4)
    with pytest.raises(ValueError, match="cannot be read as an image"):
        data[[p.name for p in data.files].index("c.png")]


def test_wrong_folders_and_options_are_described(root, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        ImageFolder(root / "absent", 4)
    with pytest.raises(ValueError, match="no sub-folders"):
        ImageFolder(root / "cat", 4)
    with pytest.raises(ValueError, match="at least 1"):
        ImageFolder(root, 0)
    with pytest.raises(ValueError, match="mode is one of"):
        ImageFolder(root, 4, mode="CMYK")
    (root / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no image"):
        ImageFolder(root, 4)


def test_without_pillow_the_extra_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install 'bayesify\[data\]'"):
        ImageFolder(root, 4)
