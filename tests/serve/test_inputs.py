"""Bodies of requests: what is read, and what is refused with a sentence."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from bayesify.data import Records, TableEncoding
from bayesify.serve import Limits, Reader, RequestError

JSON = "application/json"


def png(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture
def reader():
    return Reader(Limits(max_rows=4), shape=(2,))


def test_tensors(reader):
    request = reader(b'{"inputs": [[1, 2.5], [3, 4]]}', f"{JSON}; charset=utf-8")
    assert torch.equal(request.batch.inputs, torch.tensor([[1.0, 2.5], [3.0, 4.0]]))
    assert request.batch.rows == [1, 2]
    assert len(request) == 2
    tokens = Reader(Limits(), dtype=torch.int64)(b'{"inputs": [[1, 2, 3]]}', JSON).batch.inputs
    assert tokens.dtype == torch.int64
    both = Reader(Limits(), dtype=None)(b'{"inputs": {"ids": [[1, 2]], "weight": [[0.5, 1]]}}', JSON).batch.inputs
    assert both["ids"].dtype == torch.int64
    assert both["weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 422, "not JSON"),
        (b"{", 422, "not JSON"),
        (b"\xff\xfe", 422, "not JSON"),
        (b"[" * 100_000, 422, "not JSON"),
        (b"[[1, 2]]", 422, "must be"),
        (b'{"inputs": [[1, 2]], "rows": []}', 422, "must be"),
        (b'{"inputs": [[1, 2]], "more": 1}', 422, "must be"),
        (b'{"inputs": []}', 422, "list with an entry"),
        (b'{"inputs": 3}', 422, "list with an entry"),
        (b'{"inputs": {}}', 422, "no inputs"),
        (b'{"inputs": {"a": [1], "b": [1, 2]}}', 422, "different numbers"),
        (b'{"inputs": [[1, 2], [3]]}', 422, "no tensor"),
        (b'{"inputs": [["1", "2"]]}', 422, "no tensor"),
        (b'{"inputs": [[1, null]]}', 422, "no tensor"),
        (b'{"inputs": [[1, {}]]}', 422, "no tensor"),
        (b'{"inputs": [[1, 2, 3]]}', 422, "An example is 3, and the network was given 2"),
        (b'{"inputs": [1, 2]}', 422, "An example is a number"),
        (json.dumps({"inputs": [[0, 0]] * 5}).encode(), 413, "5 rows"),
        (b'{"rows": [{"age": 3}]}', 422, "takes no rows"),
    ],
)
def test_bodies_that_are_refused(reader, body, status, text):
    with pytest.raises(RequestError, match=text) as error:
        reader(body, JSON)
    assert error.value.status == status


def test_whole_numbers_stay_whole():
    reader = Reader(Limits(), dtype=torch.int64)
    for body, text in ((b'{"inputs": [[1.5]]}', "whole"), (json.dumps({"inputs": [[1] * 5000]}).encode(), "may have")):
        with pytest.raises(RequestError, match=text):
            reader(body, JSON)
    with pytest.raises(RequestError, match="no tensor"):
        reader(b'{"inputs": [[99999999999999999999999]]}', JSON)


def test_other_content_types_are_refused(reader):
    for kind in ("text/plain", "multipart/form-data", "image/png"):
        with pytest.raises(RequestError) as error:
            reader(b"x", kind)
        assert error.value.status == 415


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
def test_images(images, kind):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    found = Reader(Limits(), images)(png(pixels, kind), f"image/{kind.lower()}").batch.inputs
    expected = (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_images_that_are_refused(images):
    reader = Reader(Limits(max_pixels=100), images)
    whole = png(np.zeros((4, 4, 3), np.uint8))
    noise = png(np.random.default_rng(0).integers(0, 255, (9, 9, 3), np.uint8))
    for body, status in (
        (b"", 422),
        (b"not an image", 422),
        (whole[:30], 422),
        (noise[:-60], 422),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 422),  # Pillow would start a program for it
        (png(np.zeros((11, 10, 3), np.uint8)), 413),
    ):
        with pytest.raises(RequestError) as error:
            reader(body, "image/png")
        assert error.value.status == status, body[:20]
    with pytest.raises(RequestError, match="takes no rows"):  # a path would be read from this machine
        reader(b'{"rows": [{"file": "/etc/passwd"}]}', JSON)


def test_rows_of_a_table():
    table = [Records.of([{"age": 31, "label": "a"}, {"age": 33, "label": "b"}])]
    reader = Reader(Limits(max_rows=3), TableEncoding.fit(table, "label"))
    batch = reader(b'{"rows": [{"age": 33}, {"age": "old"}, {"age": 31}]}', JSON).batch
    assert batch.inputs.tolist() == [[1.0], [-1.0]]
    assert batch.rows == [1, 3]
    assert [error.row for error in batch.errors] == [2]
    for body in (b'{"rows": [1]}', b'{"rows": []}', b'{"rows": {"age": 3}}', b'{"rows": [{"height": 3}]}'):
        with pytest.raises(RequestError) as error:
            reader(body, JSON)
        assert error.value.status == 422
    with pytest.raises(RequestError, match="4 rows"):
        reader(json.dumps({"rows": [{"age": 3}] * 4}).encode(), JSON)
