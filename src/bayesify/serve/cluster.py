"""Replicas of a service on Ray Serve, on one machine or on a cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bayesify._core.optional import require
from bayesify.data import Encoding
from bayesify.decide import Guard
from bayesify.serve.application import Service, application
from bayesify.serve.limits import Limits
from bayesify.serve.watch import Report, Watch

__all__ = ["Cluster", "Deployment"]

APP, WATCH = "bayesify", "Watch"
ATTEMPTS = 4  # to start a cluster
RESTART = 2.0  # seconds between looks at whether a replica is alive


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Say what is served, where and how often.

    Attributes:
        load: Makes the guard, and the encoding of its rows or images, in each replica; it is sent there by pickle.
        limits: Of each replica.
        replicas: How many processes hold the guard.
        threads: Of torch in each.
        host: The address that is listened on.
        port: Its port.
        address: Of a Ray cluster that runs already, as "auto"; None starts one on this machine, and ends it.
        token: What a request must bring; None asks for nothing.
    """

    load: Callable[[], tuple[Guard, Encoding | None]]
    limits: Limits = field(default_factory=Limits)
    replicas: int = 2
    threads: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.replicas < 1 or self.threads < 1 or not 0 < self.port < 2**16:
            raise ValueError("A service has at least one replica with one thread, and a port from 1 to 65535.")


class RemoteWatch:
    """A watch that all replicas share, in a process of its own."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def add(self, report: Report) -> None:
        """Take a report into account."""
        await self.handle.add.remote(report)

    async def text(self) -> str:
        """Return all figures for Prometheus."""
        found: str = await self.handle.text.remote()
        return found


class Cluster:
    """Run a deployment on Ray Serve; as a context, until it is left.

    Args:
        deployment: What is served.

    Example:
        with Cluster(Deployment(load=load)) as cluster:
            print(cluster.url)
            ...
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    @property
    def url(self) -> str:
        """Where the service answers."""
        return f"http://{self.deployment.host}:{self.deployment.port}"

    def __enter__(self) -> Cluster:
        """Start, and return when all replicas are ready."""
        # Ray asks whether it may tell its makers about this cluster: no.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray runs its workers at a niceness of 15, behind everything else on the machine; a service answers people.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray = require("ray", extra="serve", purpose="the service")
        serve = require("ray.serve", extra="serve", purpose="the service")
        wanted = self.deployment
        environment = {"OMP_NUM_THREADS": str(wanted.threads), "OMP_WAIT_POLICY": "passive"}
        options: dict[str, Any] = {"address": wanted.address or "local", "namespace": APP, "log_to_driver": False}
        if wanted.address is None:  # its processes are this one's children, and have its environment
            os.environ.update(environment)
            options |= {"num_cpus": wanted.replicas, "include_dashboard": False, "object_store_memory": 100 * 2**20}
        else:
            paths = os.pathsep.join(filter(None, sys.path))
            options["runtime_env"] = {"env_vars": {**environment, "PYTHONPATH": paths}}
        signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.getsignal(number) for number in signals}
        _init(ray, options)
        for number, handler in before.items():  # Ray puts its own in the place of the program's
            signal.signal(number, handler)
        try:
            serve.start(
                proxy_location="HeadOnly" if wanted.address is None else "EveryNode",
                http_options={"host": wanted.host, "port": wanted.port, "keep_alive_timeout_s": 30},
                logging_config={"log_level": "ERROR", "enable_access_log": False},
            )
            serve.run(_bound(wanted), name=APP, route_prefix="/", logging_config={"enable_access_log": False})
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Take no new requests, answer those that are here, and stop."""
        self._stop()

    def _stop(self) -> None:
        require("ray.serve", extra="serve", purpose="the service").shutdown()
        require("ray", extra="serve", purpose="the service").shutdown()


def _init(ray: Any, options: dict[str, Any]) -> None:
    """Start or join a cluster; Ray gives a new one 30 seconds, which are not enough on a very busy machine."""
    for left in reversed(range(ATTEMPTS)):
        try:
            ray.init(**options, logging_level="ERROR")
            return
        except Exception as error:  # noqa: PERF203
            if "timed out" not in str(error) or not left:
                raise
            ray.shutdown()


def _bound(wanted: Deployment) -> Any:
    """Return the application that Ray Serve runs: one watch, and replicas that report to it."""
    serve = require("ray.serve", extra="serve", purpose="the service")
    config = require("ray.serve.config", extra="serve", purpose="the service")
    load, limits, token, threads = wanted.load, wanted.limits, wanted.token, wanted.threads

    class Watching:
        """The one watch of all replicas."""

        def __init__(self) -> None:
            self.watch = Watch(load()[0].monitor())

        def add(self, report: Report) -> None:
            self.watch.add(report)

        def text(self) -> str:
            return self.watch.text()

    def build() -> Any:
        import torch

        torch.set_num_threads(threads)
        guard, encoding = load()
        watch = RemoteWatch(serve.get_deployment_handle(WATCH, APP))
        return application(Service(guard, encoding, limits, watch, token))

    @serve.ingress(build)
    class Replica:
        """A process that holds the guard and answers requests."""

        def __init__(self, watch: Any) -> None:
            del watch  # it is bound here so that it is deployed first

    # Nothing of the watch is computed for long: it needs no processor of its own.
    watching = serve.deployment(Watching, name=WATCH).options(
        ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000
    )
    replica = serve.deployment(Replica, name="Replica").options(
        num_replicas=wanted.replicas,
        ray_actor_options={"num_cpus": 1},
        # A replica refuses what would be late, so that little may wait where it does not see it.
        max_ongoing_requests=2 * limits.max_batch,
        max_queued_requests=limits.max_batch // 2,
        backpressure_config=config.BackpressureConfig(retry_after_s=1.0),
        health_check_period_s=RESTART,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=limits.timeout + 2.0,
    )
    return replica.bind(watching.bind())
