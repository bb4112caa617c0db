from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import threading

import pytest

from experiments.data import File, data_root, download, locate
from tests.experiments.data.makers import sha256

CONTENT = b"the content " * 5000


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve a folder; ``/cut/<name>`` promises the whole file and sends half."""

    def do_GET(self) -> None:
        if not self.path.startswith("/cut/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2])
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.txt").write_bytes(CONTENT)
    (folder / "a.txt.gz").write_bytes(gzip.compress(CONTENT, mtime=123))
    (folder / "half.txt.gz").write_bytes(gzip.compress(CONTENT)[:-8])
    (folder / "other.txt").write_bytes(CONTENT + b"!")
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def file(url=None, *, gz=False):
    return File("set/a.txt", sha256(CONTENT), url, gz=gz)


def stored(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_a_missing_file_is_downloaded_once_with_progress(tmp_path, server):
    root, calls = tmp_path / "root", []
    path = locate(file(f"{server}/a.txt"), root, progress=lambda *a: calls.append(a))
    assert path.read_bytes() == CONTENT
    assert stored(root) == ["set/a.txt"]
    assert calls[-1] == (len(CONTENT), len(CONTENT))

    def refuse(url: str) -> io.BytesIO:
        raise AssertionError(f"{url} was opened again")

    assert locate(file(f"{server}/a.txt"), root, opener=refuse) == path


def test_a_packed_download_is_checked_by_its_content(tmp_path, server):
    path = locate(file(f"{server}/a.txt.gz", gz=True), tmp_path / "root")
    assert path.name == "a.txt.gz"
    assert gzip.decompress(path.read_bytes()) == CONTENT


def test_a_file_url_and_an_opener_without_headers_work(tmp_path):
    (tmp_path / "source").write_bytes(CONTENT)
    here = (tmp_path / "source").as_uri()
    assert locate(file(here), tmp_path / "one").read_bytes() == CONTENT
    opened = locate(file("any://where"), tmp_path / "two", opener=lambda _: io.BytesIO(CONTENT))
    assert opened.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "gz", "says"),
    [
        ("cut/a.txt", False, r"30000 of 60000|IncompleteRead"),
        ("other.txt", False, "sent something else .expected sha256:.*found sha256:"),
        ("half.txt.gz", True, "incomplete gzip file"),
        ("absent.txt", False, "404"),
    ],
)
def test_a_bad_download_leaves_nothing_behind(tmp_path, server, name, gz, says):
    root = tmp_path / "root"
    with pytest.raises(FileNotFoundError, match=says) as caught:
        locate(file(f"{server}/{name}", gz=gz), root)
    assert stored(root) == []
    wanted = root / "set" / ("a.txt.gz" if gz else "a.txt")
    for part in (f"fetch {server}/{name}", f"put it at {wanted}", sha256(CONTENT)):
        assert part in str(caught.value)


def test_a_refused_download_closes_its_connection(tmp_path, server):
    with pytest.raises(FileNotFoundError) as caught:
        locate(file(f"{server}/absent.txt"), tmp_path)
    assert caught.value.__cause__.closed


def test_an_interrupted_download_leaves_nothing_behind(tmp_path):
    class Interrupted(io.BytesIO):
        def read(self, *_: object) -> bytes:
            if self.tell():
                raise KeyboardInterrupt
            return super().read(100)

    with pytest.raises(KeyboardInterrupt):
        download(file("any://x"), tmp_path / "a", opener=lambda _: Interrupted(CONTENT))
    assert stored(tmp_path) == []


def test_no_connection_says_which_file_to_put_where(tmp_path):
    def offline(url: str) -> io.BytesIO:
        raise OSError("no route to host")

    with pytest.raises(FileNotFoundError, match=r"no route.*fetch http://x/a\.txt by other"):
        locate(file("http://x/a.txt"), tmp_path, opener=offline)
    with pytest.raises(FileNotFoundError, match=r"has no download.*put it at .*set BAYESIFY_DATA"):
        locate(file(), tmp_path)
    with pytest.raises(ValueError, match="no address"):
        download(file(), tmp_path / "a")


def test_a_file_on_disk_is_verified_and_never_deleted(tmp_path):
    path = tmp_path / "set" / "a.txt"
    path.parent.mkdir()
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="damaged or another version: move it away"):
        locate(file("http://never.opened/a.txt"), tmp_path)
    assert path.read_bytes() == CONTENT[:-1]
    path.write_bytes(CONTENT)
    assert locate(file(gz=True), tmp_path) == path
    md5 = dataclasses.replace(file(), digest="md5:" + hashlib.md5(CONTENT).hexdigest())
    assert locate(md5, tmp_path) == path


def test_the_root_is_the_argument_then_the_environment_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root(tmp_path / "x") == tmp_path / "x"
    monkeypatch.delenv("BAYESIFY_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "bayesify"


def test_two_downloads_at_once_both_succeed(tmp_path):
    barrier = threading.Barrier(2)

    class Slow(io.BytesIO):
        def read(self, *size: int) -> bytes:
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(timeout=5) if not self.tell() else None
            return super().read(*size)

    threads = [
        threading.Thread(
            target=download,
            args=(file("any://x"), tmp_path / "a"),
            kwargs={"opener": lambda _: Slow(CONTENT)},
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == CONTENT
