"""Codecs per layer and the quality guard on the command line: options in, rows out."""

from __future__ import annotations

from typing import Any

import pytest

RAISED = {
    "layer": 1, "asked": "int4", "chosen": "int8", "error": 0.5, "kl": 0.02, "kl_chosen": 1e-4,
    "why": "because",
}  # fmt: skip
GUARD = {
    "source": "measured", "codecs": "int4,layers:1-2=int8", "followed": True,
    "raised": [RAISED, {**RAISED, "layer": 2, "kl": 0.01}], "tokens": 256, "queries": 4,
    "seconds": 0.123, "kl_asked": 0.031, "kl_chosen": 1e-3, "kl_limit": 1.5e-3, "errors": [],
    "kls": [],
}  # fmt: skip


def test_codecs_of_layers_and_the_guard_reach_the_job(world: Any, tierd: Any) -> None:
    codec = "k8v4,layers:0-1=int8"
    assert tierd("demo", "--codec", codec, "--no-guard", "--quiet").code == 0
    assert tierd("demo", "--quiet").code == 0
    assert [(spec.codec, spec.guard) for spec in world.specs] == [(codec, False), (None, True)]


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        ("k8v4,layers:0-1", "'0-1' is not understood; write 0-1=int8"),
        ("layers:0=int8", "begins with layers; write k8v4,layers:0=int8"),
        ("int9,layers:0=int8", "'int9,layers:0=int8' is not one of 'raw', 'int8'"),
    ],
)
def test_what_is_no_codec_is_refused_before_anything_starts(
    world: Any, tierd: Any, codec: str, problem: str
) -> None:
    done = tierd("demo", "--codec", codec)
    assert done.code == 2 and problem in done.err and not world.specs


def test_the_report_says_which_layers_got_what_and_why(world: Any, tierd: Any) -> None:
    world.report["guard"] = GUARD
    out = tierd("demo").out
    out = " ".join(out.split())
    assert "KL would be 3.1e-02, with the changes below 1.0e-03; 1.5e-03 is allowed (123 ms)" in out
    assert "int4 to int8" in out and "layers 1, 2: int4 costs up to 2.0e-02" in out
    assert "not followed" not in out
    world.report["guard"] = {**GUARD, "followed": False}
    assert "not followed" in tierd("demo").out
    world.report["guard"] = {"source": "off", "why": "--no-guard; all layers keep to int4"}
    assert "off: --no-guard; all layers keep to int4" in tierd("demo").out
