"""A session whose layers have different codecs, over all tiers and two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.mixed import QUESTION, ask, space, tiny
from tests.e2e.support import Engine, embedded, namespace
from tests.engine.support import own_greedy, random_tokens
from tierd.client import Client
from tierd.errors import LayoutMismatch
from tierd.layercodecs import better_codecs
from tierd.types import CodecId, Tier

PROMPT = random_tokens(300, 3)


def test_another_process_reads_a_session_of_mixed_codecs_right(tmp_path: Path) -> None:
    model = tiny()
    with embedded(model, tmp_path, warm_blocks=3) as daemon:
        with Engine(daemon.socket, model, space=space(model), guarded=True) as engine:
            engine.prefill(PROMPT)
            assert engine.kv.guard is not None and engine.kv.guard.verdict is not None
            wanted = engine.kv.guard.verdict.codecs
            assert engine.pages(Tier.COLD) and engine.pages(Tier.WARM)
            session = engine.suspend()
        with Client.connect(daemon.socket, kind="tool") as client:
            row = client.session(session)
        codecs, logits = ask(daemon.socket, session)
        file = tmp_path / "seen.npz"
        command = [sys.executable, "-m", "tests.e2e.mixed", daemon.socket, session, str(file)]
        subprocess.run(command, check=True, timeout=120)
        seen = np.load(file)
    assert len(set(wanted)) > 1 and wanted[1] is not CodecId.INT4 and wanted[2] is CodecId.INT8
    assert row["page_codecs"] == [codec.name.lower() for codec in wanted]
    assert (codecs[:, 0] == CodecId.RAW).all()
    for layer, newest in enumerate(wanted):
        asked = CodecId.INT8 if layer == 2 else CodecId.INT4
        ladder = [int(codec) for codec in (asked, *better_codecs(asked))]
        found = codecs[layer, 1:].tolist()  # a layer may have risen as the session grew
        assert found == sorted(found, key=ladder.index) and found[-1] == newest
    assert (seen["codecs"] == codecs).all()
    np.testing.assert_allclose(seen["logits"], logits, atol=1e-4)
    exact = own_greedy(model.model, [*PROMPT, *QUESTION], 1)[1][0].numpy()
    assert np.abs(logits - exact).max() < 0.25 * np.abs(exact).max()


def test_a_session_of_other_codecs_is_not_resumed_and_says_what_differs(tmp_path: Path) -> None:
    model = tiny()
    with embedded(model, tmp_path, warm_blocks=10) as daemon:
        with Engine(daemon.socket, model, space=space(model)) as engine:
            engine.prefill(PROMPT[:40])
            session = engine.suspend()
        with Client.connect(daemon.socket, kind="tool") as client:
            assert client.session(session)["codec"] == "int4,layers:2=int8"
        with pytest.raises(LayoutMismatch, match="it differs in codec_layers"):
            Engine(daemon.socket, model, resume=session, space=namespace(model, CodecId.INT4))
