"""An engine in a process of its own that resumes a session of mixed codecs, and says what it saw.

    python -m tests.e2e.mixed SOCKET SESSION FILE

FILE (.npz): the codecs of its pages [layers, blocks], and the logits after QUESTION.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.e2e.support import Engine, namespace
from tests.engine.support import TinyModel, outlier_model
from tierd.types import CodecId, Namespace

QUESTION = (3, 1, 4, 1, 5)


def tiny() -> TinyModel:
    """Return the model of both processes."""
    return outlier_model(1, outlier=300.0)


def space(model: TinyModel) -> Namespace:
    """Return its namespace: 4 bits, but for the last layer."""
    return namespace(model, CodecId.INT4, "2=int8")


def ask(socket: str, session: str) -> tuple[np.ndarray, np.ndarray]:
    """Resume a session, feed QUESTION; return its pages' codecs and the logits."""
    model = tiny()
    with Engine(socket, model, resume=session, space=space(model), guarded=True) as engine:
        codecs = engine.handle.table.read(engine.handle.sealed_blocks).codec.copy()
        logits = engine.generator.feed(list(QUESTION))
        assert engine.kv.guard is not None and engine.kv.guard.verdict is not None
        assert engine.kv.guard.verdict.source == "resumed"
        assert engine.kv.guard.verdict.codecs == tuple(codecs[:, -1].tolist())
    return codecs, logits.numpy()


if __name__ == "__main__":
    found_codecs, found_logits = ask(sys.argv[1], sys.argv[2])
    np.savez(sys.argv[3], codecs=found_codecs, logits=found_logits)
