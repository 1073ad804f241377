"""Metrics: what calls and the store are exported as."""

import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.rig import Rig
from tierd.metrics import Metrics, StoreMetrics


def exported(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_calls_are_counted_by_method_and_code() -> None:
    metrics = Metrics()
    metrics.call_done("/tierd.rpc.v1.Placement/Commit", "OK", 0.0007)
    metrics.call_done("/tierd.rpc.v1.Placement/Commit", "STALE", 0.3)
    found = exported(metrics)
    assert found['tierd_calls_total{code="OK",method="Placement/Commit"}'] == 1
    assert found['tierd_calls_total{code="STALE",method="Placement/Commit"}'] == 1
    assert found['tierd_call_seconds_count{method="Placement/Commit"}'] == 2
    assert found['tierd_call_seconds_bucket{le="0.001",method="Placement/Commit"}'] == 1


def test_the_store_is_exported_as_it_stands() -> None:
    rig = Rig()
    rig.engine()
    rig.demote(rig.session(), [1, 2])
    metrics = Metrics()
    metrics.registry.register(StoreMetrics(rig.store.stats))
    found = exported(metrics)
    assert found['tierd_tier_pages{tier="warm"}'] == 4
    assert found["tierd_demotions_total"] == 4
    assert found['tierd_sessions{state="running"}'] == 1
    assert found['tierd_hints_total{outcome="wasted"}'] == 0


def test_they_are_served_on_this_host_until_stopped() -> None:
    snapshot: Any = Rig().store.stats
    metrics = Metrics()
    port = free_port()
    stop = metrics.serve(port, snapshot)
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        assert b"tierd_engines 0.0" in answer.read()
    stop()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5.0)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
