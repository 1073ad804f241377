"""Metrics in Prometheus' form: calls as they end, and the store as it stands when asked.

Names end in their unit. Labels are tiers, methods, codes and outcomes: never
sessions or clients, of which there is no end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierd.census import COUNTERS

# A call over the unix socket takes half a millisecond; one that waits for room, seconds.
_BUCKETS_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
_TIER_GAUGES = {
    "pages": "Pages in the tier",
    "bytes": "Bytes of the pages in the tier, and of backups",
    "capacity_bytes": "Bytes the tier may use",
    "used_bytes": "Bytes of the tier's slabs",
    "peak_bytes": "Most bytes of slabs so far",
    "reserved_slots": "Slots lent or being filled",
    "retired_slots": "Slots that wait for steps to end",
    "backup_pages": "Cold copies of pages that are warm",
    "backup_bytes": "Bytes of cold copies of pages that are warm",
}
_OUTCOMES = ("useful", "late", "wasted", "cancelled")


class StoreMetrics:
    """A collector over `snapshot`: Store.stats(), from whatever thread asks."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the store's figures as they stand now."""
        stats = self._snapshot()
        for field, text in _TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"tierd_tier_{field}", text, labels=["tier"])
            for tier, figures in stats["tiers"].items():
                gauge.add_metric([tier], figures[field])
            yield gauge
        for name in COUNTERS:
            yield CounterMetricFamily(f"tierd_{name}", f"{name} so far", value=stats[name])
        sessions = GaugeMetricFamily("tierd_sessions", "Sessions by state", labels=["state"])
        for state, count in stats["sessions"].items():
            sessions.add_metric([state], count)
        yield sessions
        hints = CounterMetricFamily("tierd_hints", "Hints by outcome", labels=["outcome"])
        for outcome in _OUTCOMES:
            hints.add_metric([outcome], stats["hints"][outcome])
        yield hints
        yield GaugeMetricFamily("tierd_engines", "Engines connected", value=stats["engines"])


class Metrics:
    """A daemon's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["method", "code"]
        self._calls = Counter("tierd_calls", "Calls that ended", labels, registry=self.registry)
        self._seconds = Histogram(
            "tierd_call_seconds", "Time of calls", ["method"],
            buckets=_BUCKETS_SECONDS, registry=self.registry,
        )  # fmt: skip

    def call_done(self, method: str, code: str, seconds: float) -> None:
        """Count a call: its full method name, its gRPC code, how long it took."""
        name = method.rpartition(".")[2]  # "Placement/Commit"
        self._calls.labels(name, code).inc()
        self._seconds.labels(name).observe(seconds)

    def serve(
        self, port: int, snapshot: Callable[[], dict[str, Any]], *, address: str = "127.0.0.1"
    ) -> Callable[[], None]:
        """Serve over HTTP, in a thread, on this host alone; return how to stop. Raises OSError."""
        self.registry.register(StoreMetrics(snapshot))
        server, thread = start_http_server(port, address, self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=2.0)

        return stop
