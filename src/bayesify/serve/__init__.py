"""A guard as an HTTP service: `bayesify serve GUARD`.

`Service` and `application` are the service in one process, for any ASGI server; `run` starts replicas of it on Ray
Serve. Needs `bayesify[serve]`.
"""

from __future__ import annotations

from bayesify.serve.application import LocalWatch, Service, WatchLike, application
from bayesify.serve.batching import Batcher, LateError, OverloadError, Pace
from bayesify.serve.engine import Decided, Engine
from bayesify.serve.inputs import Reader, Requested, RequestError
from bayesify.serve.limits import Limits
from bayesify.serve.watch import Report, Watch

__all__ = [
    "Batcher",
    "Decided",
    "Engine",
    "LateError",
    "Limits",
    "LocalWatch",
    "OverloadError",
    "Pace",
    "Reader",
    "Report",
    "RequestError",
    "Requested",
    "Service",
    "Watch",
    "WatchLike",
    "application",
]
