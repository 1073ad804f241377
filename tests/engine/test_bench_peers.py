"""llama.cpp beside us: a process that is filled, says what it holds, and steps on command."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest

from tierd.errors import InvalidArgument
from tierd_engine.bench import decode, peers
from tierd_engine.bench.decode import DecodeRow
from tierd_engine.bench.peers import Peer

_SERVER = """
import json, os, sys
print(json.dumps({stands}), flush=True)
for line in sys.stdin:
    seconds = [0.25] * int(line)
    print(json.dumps({{"seconds": seconds, "peak_rss_bytes": len(os.environ["GOMP_SPINCOUNT"])
        if "GOMP_SPINCOUNT" in os.environ else 7}}), flush=True)
"""


def command(stands: dict[str, object] | None = None) -> list[str]:
    found = {"version": "x", "first_position": 0, "last_position": 2047, "cells": 2048}
    return [sys.executable, "-c", _SERVER.format(stands=json.dumps(found | (stands or {})))]


def test_a_peer_steps_on_command_with_threads_that_wait_as_upstream_lets_them(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    with contextlib.closing(Peer(command(), "f16", 2048)) as peer:
        assert peer.seconds(3) == [0.25] * 3
        assert peer.seconds(1) == [0.25]
        assert peer.peak_rss_bytes == 7  # the stub's answer where the variable is not set
    peer.close()


@pytest.mark.parametrize(
    "stands", [{"first_position": 1}, {"last_position": 2046}, {"cells": 1024}]
)
def test_a_cache_that_lacks_a_token_is_refused(stands):
    with pytest.raises(InvalidArgument, match="2048 tokens"):
        Peer(command(stands), "f16", 2048)


def test_a_peer_that_ends_is_an_error_with_its_last_words():
    with pytest.raises(InvalidArgument, match="no such file"):
        Peer([sys.executable, "-c", "raise SystemExit('no such file')"], "f16", 2048)
    dies = [*command()[:2], command()[2].replace("for line", "sys.exit('gone')\nfor line")]
    with contextlib.closing(Peer(dies, "f16", 2048)) as peer:
        peer._process.wait(10)
        with pytest.raises(InvalidArgument, match="gone"):
            peer.seconds(1)


def test_a_peer_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(peers, "_FILL_SECONDS_MAX", 0.1)
    with pytest.raises(InvalidArgument, match="did not answer"):
        Peer([sys.executable, "-c", "input()"], "f16", 2048)


def test_measured_peers_are_kept_over_those_of_the_same_context(tmp_path, monkeypatch):
    path = tmp_path / "peers.json"
    path.write_text('{"version": 1, "rows": []}')
    monkeypatch.setattr(peers, "KEPT", path)
    with contextlib.closing(Peer(command(), "f16", 2048)) as peer:
        peers.keep_figures([(peer, 1.0)])
        peers.keep_figures([(peer, 2.0)])
    (figure,) = peers.kept_figures()
    assert (figure.kv, figure.context_tokens, figure.tokens_per_second) == ("f16", 2048, 2.0)
    assert figure.origin.startswith("kept: 20") and "load" in figure.origin


def test_ratios_are_to_what_alternated_with_the_row_and_not_to_what_is_kept():
    row = DecodeRow(decode.MAIN.name, 2048, 10.0)
    with contextlib.closing(Peer(command(), "f16", 2048)) as peer:
        done = decode._with_ratios(row, [0.5, 0.25], [peer])
    kept = DecodeRow("llama.cpp f16", 2048, 1.0)
    other = DecodeRow("llama.cpp q8_0", 2048, 4.0)
    done = decode.with_peer_ratios(done, [done, kept, other])
    assert done.ratio_to_transformers == 5.0
    assert done.ratio_to_llama_cpp_f16 == 2.5
    assert done.ratio_to_llama_cpp_q8_0 == 2.5


def test_rounds_of_a_row_alternate_with_those_of_every_other():
    class Counted:
        @staticmethod
        def start_counting() -> None:
            order.append("counting")

    order: list[str] = []
    ours = decode.Runner("x", lambda: order.append("x"), 0, 0, kv=Counted())  # type: ignore[arg-type]

    def other(name: str, seconds: float) -> list[float]:
        order.append(name)
        return [seconds]

    found = decode._alternate(ours, [lambda: other("a", 2.0), lambda: other("b", 3.0)], 2)
    assert found[1:] == [2.0, 3.0]
    assert order == ["x"] * 3 + ["a", "b", "counting"] + ["x", "x", "a", "b"] * 3
