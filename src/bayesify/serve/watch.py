"""What a service says of itself: requests, batches, verdicts and whether the data have left, for Prometheus."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bayesify._core.optional import require
from bayesify.decide import Monitor
from bayesify.decide.verdicts import OOD, VERDICTS

__all__ = ["Report", "Watch"]

RECENT = 1000  # inputs that the share of OOD inputs is of
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass
class Report:
    """Collect what a replica did since its last report.

    Attributes:
        statuses: How many requests were answered with each HTTP status.
        seconds: How long each that was answered with 200 took.
        batches: Rows and seconds of each batch.
        codes: Of the verdicts.
        p_values: Of the same inputs.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    batches: list[tuple[int, float]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    p_values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is anything to report."""
        return bool(self.statuses or self.batches)


class Watch:
    """Add up the reports of all replicas; one watch sees the whole stream, as the `Monitor`'s guarantee needs it.

    Args:
        monitor: Looks for drift, with no input seen yet or from `Monitor.from_dict`.

    >>> watch = Watch(Monitor(known=1000))
    >>> watch.add(Report(Counter({200: 2}), [0.01, 0.02], [(2, 0.01)], [0, 2], [0.5, 0.001]))
    >>> [line for line in watch.text().splitlines() if line.startswith("bayesify_verdicts_total")]
    ['bayesify_verdicts_total{verdict="answer"} 1.0', 'bayesify_verdicts_total{verdict="ask"} 0.0',
     'bayesify_verdicts_total{verdict="ood"} 1.0']
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._client = client = require("prometheus_client", extra="serve", purpose="the metrics of the service")
        self._registry = registry = client.CollectorRegistry()
        self._recent: deque[int] = deque(maxlen=RECENT)

        def made(kind: str, name: str, about: str, labels: Sequence[str] = (), **options: Any) -> Any:
            return getattr(client, kind)(f"bayesify_{name}", about, labels, registry=registry, **options)

        self._requests = made("Counter", "requests", "Requests to /predict by HTTP status.", ["status"])
        self._seconds = made("Histogram", "request_seconds", "Seconds of an answered request.", buckets=SECONDS)
        self._rows = made("Histogram", "batch_rows", "Rows that were decided together.", buckets=ROWS)
        self._batch = made("Histogram", "batch_seconds", "Seconds of a batch.", buckets=SECONDS)
        self._verdicts = made("Counter", "verdicts", "Verdicts by name.", ["verdict"])
        self._share = made("Gauge", "ood_share", f"Share of OOD verdicts in the last {RECENT} inputs.")
        self._seen = made("Gauge", "monitor_inputs", "Inputs that the monitor has seen.")
        self._evidence = made("Gauge", "monitor_evidence", "Log of the monitor's capital; it rises with drift.")
        self._alarm = made("Gauge", "monitor_alarm", "1 if the data have left those that the guard knows.")
        for name in VERDICTS:
            self._verdicts.labels(name)

    def add(self, report: Report) -> None:
        """Take a report into account."""
        for status, count in report.statuses.items():
            self._requests.labels(str(status)).inc(count)
        for seconds in report.seconds:
            self._seconds.observe(seconds)
        for rows, seconds in report.batches:
            self._rows.observe(rows)
            self._batch.observe(seconds)
        for code, count in Counter(report.codes).items():
            self._verdicts.labels(VERDICTS[code]).inc(count)
            self.monitor.counts[VERDICTS[code]] += count
        self._recent.extend(report.codes)
        if report.p_values:
            self.monitor.update(torch.tensor(report.p_values, dtype=torch.float64))

    def text(self) -> str:
        """Return all figures in the format that Prometheus reads."""
        if self._recent:
            self._share.set(self._recent.count(OOD) / len(self._recent))
        self._seen.set(self.monitor.seen)
        self._evidence.set(self.monitor.evidence)
        self._alarm.set(self.monitor.alarm)
        found: bytes = self._client.generate_latest(self._registry)
        return found.decode()
