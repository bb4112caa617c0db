"""The page in a browser: a person drops an image and sees the verdict."""

import io
import threading
import time

import numpy as np
import pytest
from PIL import Image

from bayesify.serve import Service, application
from tests.serve.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def served():
    import uvicorn

    class Served:
        def __init__(self, service):
            config = uvicorn.Config(application(service), host="127.0.0.1", port=0, log_level="error")
            self.server = uvicorn.Server(config)
            self.thread = threading.Thread(target=self.server.run)

        def __enter__(self):
            self.thread.start()
            while not self.server.started:
                time.sleep(0.02)
            port = self.server.servers[0].sockets[0].getsockname()[1]
            return f"http://127.0.0.1:{port}/"

        def __exit__(self, *_):
            self.server.should_exit = True
            self.thread.join()

    return Served


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_dropped_image_shows_its_verdict(served, image_guard, images, width):
    pixels = np.random.default_rng(3).integers(0, 255, (4, 4, 3), np.uint8)
    expected = image_guard(images.read(io.BytesIO(png(pixels))))
    with served(Service(image_guard, images)) as url, Browser(url, (width, 900)) as page:
        text = page.drop(png(pixels))
        assert expected.reason[0] in text
        title = {
            "answer": ("cat", "dog", "owl")[expected.label[0]],
            "ask": "Ask a person",
            "ood": "Out of distribution",
        }
        assert text.startswith(title[expected.verdict[0]])
        assert page.run("document.documentElement.scrollWidth") <= width  # nothing sticks out
        assert "cannot be read as an image" in page.drop(b"\x89PNG broken")
        assert "That is no image" in page.drop(b"text", "text/plain")


def test_the_token_and_json_where_there_are_no_images(served, guard):
    with served(Service(guard, token="s3cret")) as url, Browser(url) as page:
        press = "document.getElementById('send').click()"
        page.run(press)
        said = "document.getElementById('result').innerText"
        assert "asks for a token" in page._until(lambda: "token" in page.run(said) and page.run(said))
        page.run("document.getElementById('token').value = 's3cret'")
        page.run("document.getElementById('json').value = '{\"inputs\": [[3, -3]]}'")
        page.run(press)
        assert "left" in page._until(lambda: "p-value" in page.run(said) and page.run(said))


def test_the_description_is_a_page(served, guard):
    with served(Service(guard)) as url, Browser(url + "docs") as page:
        text = page._until(lambda: page.run("document.getElementById('paths').innerText") or None)
        for name in ("/predict", "/metrics", "Retry-After", "prediction_set", "curl"):
            assert name in text
