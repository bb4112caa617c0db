"""`bayesify serve`: a guard as an HTTP service."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from bayesify.cli._data import IMAGENET_MEAN, IMAGENET_STD
from bayesify.cli._guard import SavedNetworkOptions
from bayesify.cli._options import Command
from bayesify.cli._output import JobError, Output, UsageError
from bayesify.data import Encoding, ImageEncoding
from bayesify.decide import Guard
from bayesify.serve import Limits

__all__ = ["Serve", "ServedImages"]

TOKEN = "BAYESIFY_TOKEN"


@dataclass(frozen=True, kw_only=True)
class ServedImages:
    """How images become inputs, where the guard does not say it.

    Attributes:
        image_size: Height and width in pixels; a guard that was made from a folder of images needs none.
        grey: Read images as grey.
        normalise: Remove ImageNet's mean and standard deviation from pixels in [0, 1].
    """

    image_size: Annotated[int | None, arg(metavar="PIXELS")] = None
    grey: bool = False
    normalise: Literal["none", "imagenet"] = "none"

    def encoding(self) -> Encoding | None:
        """Return how an image becomes an input; None where that was not said."""
        if self.image_size is None:
            if self.grey or self.normalise != "none":
                raise UsageError("--grey and --normalise are of images: say --image-size too")
            return None
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if self.normalise == "imagenet" else ((0.0,) * 3, (1.0,) * 3)
        mode, channels = ("L", 1) if self.grey else ("RGB", 3)
        size = (self.image_size, self.image_size)
        return ImageEncoding("file", Path(), size, mode, tuple(mean[:channels]), tuple(std[:channels]))


@dataclass(frozen=True, kw_only=True)
class Serve(Command):
    r"""Answer requests over HTTP: a verdict for each input, with the reason.

    Examples:
      bayesify serve guard --model my_project.models:make_network --weights network.safetensors
      bayesify serve guard --model nets:resnet20 --image-size 32 --normalise imagenet --replicas 4 --port 8080
      curl localhost:8000/predict -H 'Content-Type: image/png' --data-binary @cat.png
      curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"inputs": [[5.1, 3.5, 1.4, 0.2]]}'

    POST /predict, /health, /ready, /metrics (Prometheus), /docs and /openapi.json; at / a page for a person.
    Replicas are processes of Ray Serve; one that dies is started again. Requests that would be late are refused
    with 503 and Retry-After. A token is asked for where the environment has BAYESIFY_TOKEN, or with --token-file.
    Ctrl-C or SIGTERM answers what is here, and stops.

    Attributes:
        guard: A folder that 'bayesify guard' or Guard.save wrote.
        host: The address to listen on; 0.0.0.0 is every one of this machine.
        port: The port to listen on.
        replicas: How many processes hold the guard.
        threads: Of torch, in each.
        cluster: The address of a Ray cluster that runs already, as auto; None starts one on this machine. The folder
            and the network's code must be on every machine, under the same path.
        token_file: A file with the token that requests must bring.
    """

    guard: Positional[Annotated[Path, arg(metavar="GUARD")]]
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 2
    threads: int = 1
    cluster: Annotated[str | None, arg(metavar="ADDRESS")] = None
    token_file: Annotated[Path | None, arg(metavar="FILE")] = None
    network: OmitArgPrefixes[SavedNetworkOptions]
    images: OmitArgPrefixes[ServedImages]
    limits: OmitArgPrefixes[Limits]

    def run(self) -> Output:
        """Serve until a signal comes."""
        from bayesify.serve.cluster import Cluster, Deployment

        token = self._token()
        load = Loader(str(self.guard.absolute()), self.network, self.images, os.getcwd())
        load()  # what is wrong with guard or network is said here, before anything is started
        deployment = Deployment(
            load=load,
            limits=self.limits,
            replicas=self.replicas,
            threads=self.threads,
            host=self.host,
            port=self.port,
            address=self.cluster,
            token=token,
        )
        _check_port(self.host, self.port)
        if token is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"Everyone who reaches {self.host} can ask: set {TOKEN} or give --token-file.", file=sys.stderr)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        print("Starting ...", file=sys.stderr, flush=True)
        with Cluster(deployment) as cluster:
            print(f"{cluster.url} answers, with {self.replicas} replica(s). Ctrl-C stops.", file=sys.stderr, flush=True)
            stop.wait()
            print("Stopping ...", file=sys.stderr, flush=True)
        return Output("Stopped.", {"stopped": True})

    def _token(self) -> str | None:
        if self.token_file is None:
            return os.environ.get(TOKEN) or None
        try:
            found = self.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise JobError(f"The token cannot be read: {error}") from error
        if not found:
            raise JobError(f"{self.token_file} is empty: write a token into it.")
        return found


@dataclass(frozen=True)
class Loader:
    """Loads a guard in a replica, as the command line named it.

    Attributes:
        guard: The folder.
        network: Where the network comes from.
        images: How images become inputs.
        folder: Where the command was given, in which modules are looked for.
    """

    guard: str
    network: SavedNetworkOptions
    images: ServedImages
    folder: str

    def __call__(self) -> tuple[Guard, Encoding | None]:
        """Return the guard and the encoding of its inputs."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        found: Any = self.network.open(self.guard)
        given = self.images.encoding()
        if given is not None and found.encoding is not None:
            raise UsageError("this guard says itself how its inputs are read: leave out --image-size")
        encoding = given if found.encoding is None else found.encoding
        if isinstance(encoding, ImageEncoding):
            encoding = dataclasses.replace(encoding, root=Path())
        return found.guard, encoding


def _check_port(host: str, port: int) -> None:
    """Say now that a port is taken, and not after a minute."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise JobError(f"Nothing can listen on {host}:{port} ({error.strerror}): give another --port.") from error
