"""The service as an ASGI application: what is asked of it over HTTP, whatever server runs it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Protocol

from bayesify import __version__
from bayesify._core.optional import require
from bayesify.data import Encoding, ImageEncoding
from bayesify.decide import Guard
from bayesify.serve.batching import SHARE, Batcher, LateError, OverloadError, Pace
from bayesify.serve.engine import Decided, Engine
from bayesify.serve.inputs import Reader, Requested, RequestError
from bayesify.serve.limits import Limits
from bayesify.serve.openapi import PREDICT, PROBLEMS
from bayesify.serve.watch import Report, Watch

__all__ = ["LocalWatch", "Service", "WatchLike", "application"]

REPORTS = 0.25  # seconds between reports to the watch
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class WatchLike(Protocol):
    """A watch, in this process or in another."""

    async def add(self, report: Report) -> None:
        """Take a report into account."""

    async def text(self) -> str:
        """Return all figures for Prometheus."""


@dataclass
class LocalWatch:
    """A watch in this process.

    Attributes:
        watch: The watch.
    """

    watch: Watch

    async def add(self, report: Report) -> None:
        """Take a report into account."""
        self.watch.add(report)

    async def text(self) -> str:
        """Return all figures for Prometheus."""
        return self.watch.text()


@dataclass(eq=False)
class Service:
    """All that a process needs to answer requests.

    Attributes:
        guard: What decides.
        encoding: How rows, or images, become inputs; None takes tensors alone.
        limits: Of requests and of the queue.
        watch: Where figures are added up; None makes one in this process.
        token: What a request must bring as `Authorization: Bearer ...`; None asks for nothing.
    """

    guard: Guard
    encoding: Encoding | None = None
    limits: Limits = field(default_factory=Limits)
    watch: WatchLike | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        """Make the parts, and decide made-up inputs: the first request then finds all ready."""
        if self.watch is None:
            self.watch = LocalWatch(Watch(self.guard.monitor()))
        labels = None if self.encoding is None else self.encoding.labels
        self.engine = Engine(self.guard, labels)
        self.reader = Reader.of(self.guard.posterior, self.limits, self.encoding)
        self.batcher = Batcher(self._decide, max_rows=self.limits.max_batch, timeout=self.limits.timeout)
        self.pace = Pace()
        self.stopping = False
        self._report = Report()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._reporting: asyncio.Task[None] | None = None
        seconds = self.engine.warm_up(self.limits.max_batch)
        if seconds is not None:
            self.batcher.note(self.limits.max_batch, seconds)

    # -- one request --------------------------------------------------------------------------------------------------

    async def predict(self, body: AsyncIterator[bytes], kind: str, length: int | None, *, probs: bool) -> Decided:
        """Answer a request, or raise why not.

        Args:
            body: Its bytes, as they come.
            kind: Its content type.
            length: How many bytes it says it has.
            probs: Whether the probabilities of all classes are wanted.
        """
        began = time.monotonic()
        wait = 1.0 if self.stopping else self.pace.wait
        if self.stopping or wait > SHARE * self.limits.timeout:
            await self.content(body, length)
            raise OverloadError(wait)
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().create_task(self._keep_reporting())
        self.pace.enter()
        answered = False
        try:
            found = await self._predict(began, body, kind, length, probs=probs)
            answered = True
        finally:
            self.pace.leave(answered=answered)
        self._report.codes += found.codes
        self._report.p_values += found.p_values
        return found

    async def _predict(
        self, began: float, body: AsyncIterator[bytes], kind: str, length: int | None, *, probs: bool
    ) -> Decided:
        content = await self.content(body, length)
        work = asyncio.get_running_loop().run_in_executor(
            self._reading, lambda: self.reader(content, kind, probs=probs)
        )
        request: Requested = await work
        left = self.limits.timeout - (time.monotonic() - began)
        found: Decided = await self.batcher(request, rows=len(request), seconds=left)
        return found

    async def content(self, body: AsyncIterator[bytes], length: int | None) -> bytes:
        """Return the body of a request.

        That of a refused request is read too: a server that answers before it has read resets the connection, and the
        answer is lost.
        """
        most = self.limits.max_bytes
        if length is not None and length > most:
            raise RequestError(413, f"The body has {length:,} bytes, and may have {most:,}.")
        parts = bytearray()

        async def read() -> None:
            async for part in body:
                parts.extend(part)
                if len(parts) > most:
                    raise RequestError(413, f"The body has more than {most:,} bytes.")

        try:
            await asyncio.wait_for(read(), self.limits.timeout)
        except asyncio.TimeoutError as error:
            raise RequestError(408, f"The body did not arrive within {self.limits.timeout:g} seconds.") from error
        return bytes(parts)

    def _decide(self, requests: Sequence[Requested]) -> list[Decided | Exception]:
        began = time.perf_counter()
        found = self.engine(requests)
        self._report.batches.append((sum(map(len, requests)), time.perf_counter() - began))
        return found

    def allowed(self, authorization: str | None) -> bool:
        """Return whether a request brings the token."""
        if self.token is None:
            return True
        kind, _, given = (authorization or "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())

    # -- figures ------------------------------------------------------------------------------------------------------

    def note(self, status: int, seconds: float) -> None:
        """Remember how a request ended."""
        self._report.statuses[status] += 1
        if status == 200:
            self._report.seconds.append(seconds)

    async def report(self) -> None:
        """Tell the watch what happened since the last report."""
        report, self._report = self._report, Report()
        if report:
            assert self.watch is not None
            await self.watch.add(report)

    async def metrics(self) -> str:
        """Return the figures of all replicas for Prometheus."""
        assert self.watch is not None
        await self.report()
        return await self.watch.text()

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORTS)
            with contextlib.suppress(Exception):  # figures may be lost, answers not
                await self.report()

    async def close(self) -> None:
        """Take no more requests, answer those that are here, and report."""
        self.stopping = True
        await self.batcher.close(self.limits.timeout)
        if self._reporting is not None:
            self._reporting.cancel()
        with contextlib.suppress(Exception):
            await self.report()
        self._reading.shutdown(wait=False)

    # -- pages --------------------------------------------------------------------------------------------------------

    def page(self, name: str) -> str:
        """Return a page, with what it must know of the service written into it."""
        encoding, rules = self.encoding, self.guard.rules
        about = {
            "version": __version__,
            "classes": list(rules.classes),
            "image": list(encoding.size) if isinstance(encoding, ImageEncoding) else None,
            "rows": encoding is not None and not isinstance(encoding, ImageEncoding),
            "shape": None if self.reader.shape is None else list(self.reader.shape),
            "token": self.token is not None,
            "promise": rules.promise,
            "id_acceptance": rules.id_acceptance,
            "coverage": self.guard.sets.coverage,
        }
        text = resources.files("bayesify.serve").joinpath(name).read_text(encoding="utf-8")
        return text.replace("/*ABOUT*/null", json.dumps(about).replace("<", "\\u003c"))


def application(service: Service) -> Any:
    """Return the ASGI application of a service, for any ASGI server; needs `bayesify[serve]`.

    `POST /predict`, `/health`, `/ready`, `/metrics`, `/openapi.json`, a page about it at `/docs`, and at `/` one on
    which a person drops an image.

    Args:
        service: A guard, its limits and its watch.

    Example:
        >>> import torch
        >>> from bayesify import convert
        >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
        >>> network = torch.nn.Linear(2, 2, bias=False)
        >>> _ = network.weight.data.copy_(20 * torch.eye(2))
        >>> guard = Guard.fit(convert(network, "map"), [(x, x.argmax(1))], max_risk=0.05)
        >>> application(Service(guard)).title  # uvicorn.run(application(Service(guard))) serves it
        'bayesify'
    """
    fastapi = require("fastapi", extra="serve", purpose="the service")
    responses = require("fastapi.responses", extra="serve", purpose="the service")

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await service.close()

    app = fastapi.FastAPI(
        title="bayesify",
        version=__version__,
        description="Verdicts of inputs: answer, ask a person, or OOD.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    JSON, HTML, Text = responses.JSONResponse, responses.HTMLResponse, responses.PlainTextResponse

    def problem(status: int, text: str, retry_after: float | None = None) -> Any:
        headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return JSON({"error": text}, status, headers)

    def denied(request: Any) -> Any:
        if service.allowed(request.headers.get("authorization")):
            return None
        return problem(401, "This service asks for a token: send Authorization: Bearer TOKEN.")

    async def answered(request: Any) -> Any:
        text = request.headers.get("content-length", "")
        length = int(text) if text.isdigit() else None
        probs = request.query_params.get("probs", "").lower() in ("1", "true", "yes")
        kind = request.headers.get("content-type", "")
        try:
            if (refusal := denied(request)) is not None:
                await service.content(request.stream(), length)
                return refusal
            found = await service.predict(request.stream(), kind, length, probs=probs)
        except RequestError as error:
            return problem(error.status, str(error))
        except OverloadError as error:
            return problem(503, str(error), error.retry_after)
        except LateError as error:
            return problem(504, str(error), service.batcher.wait)
        return JSON({"verdicts": found.lines})

    async def predict(request: Any) -> Any:
        began = time.perf_counter()
        status = 500
        try:
            response = await answered(request)
            status = response.status_code
            return response
        finally:
            service.note(status, time.perf_counter() - began)

    async def health() -> Any:
        return {"status": "alive", "version": __version__}

    async def ready() -> Any:
        if service.stopping:
            return problem(503, "The service is stopping.", 1.0)
        return {"status": "ready", "wait_seconds": round(service.batcher.wait, 4)}

    async def metrics(request: Any) -> Any:
        refusal = denied(request)
        return Text(await service.metrics(), media_type="text/plain; version=0.0.4") if refusal is None else refusal

    async def start() -> Any:
        return HTML(service.page("start.html"), headers=HEADERS)

    async def docs() -> Any:
        return HTML(service.page("docs.html"), headers=HEADERS)

    # FastAPI reads from the annotations what it hands over, and what it should check of what is returned: nothing.
    predict.__annotations__ = metrics.__annotations__ = {"request": fastapi.Request}
    health.__annotations__ = ready.__annotations__ = start.__annotations__ = docs.__annotations__ = {}
    app.post("/predict", summary="Decide inputs", openapi_extra=PREDICT, responses=PROBLEMS)(predict)
    app.get("/health", summary="Whether the process is alive")(health)
    app.get("/ready", summary="Whether it takes requests")(ready)
    app.get("/metrics", summary="Figures for Prometheus")(metrics)
    app.get("/", include_in_schema=False)(start)
    app.get("/docs", include_in_schema=False)(docs)
    return app
