"""An engine that is killed at any moment: it keeps, resumes and drops sessions, and checks bytes.

Prints what it knows to be so: "kept ID BLOCKS" once a suspension was acknowledged,
"dropping ID" before it lets one go, "WRONG …" for a page with other bytes.
"""

from __future__ import annotations

import random
import time
from typing import NoReturn

import numpy as np

from tests.wirerig import (
    GEOMETRY,
    INT8,
    LAYERS,
    MAX_TOKENS,
    codec_at,
    demote,
    page_bytes,
    read_page,
)
from tierd.client import Client, SessionHandle
from tierd.errors import TierdError

KEPT_MAX = 4


def tell(line: str) -> None:
    # One write: a line of a killed process is whole or not there.
    print(line + "\n", end="", flush=True)


def token_ids(blocks: int) -> np.ndarray:
    return np.arange(blocks * GEOMETRY.block_tokens, dtype=np.uint32)


def check(client: Client, handle: SessionHandle, blocks: int) -> None:
    """Read every page as a step would, and tell what is wrong."""
    assert client.epochs is not None
    with client.epochs.step(handle.table.epoch()):
        for block in range(blocks):
            for layer in range(LAYERS):
                found = read_page(client, handle, layer, block)
                if found != page_bytes(layer, block, codec_at(block)):
                    tell(f"WRONG {handle.id} layer {layer} block {block}")


def act(client: Client, kept: dict[str, int], draw: random.Random) -> None:
    if len(kept) >= KEPT_MAX or (kept and draw.random() < 0.4):
        number, blocks = draw.choice(sorted(kept.items()))
        handle = client.resume(number, INT8, MAX_TOKENS)
        if handle.sealed_blocks != blocks:
            tell(f"WRONG {number} has {handle.sealed_blocks} blocks of {blocks}")
        check(client, handle, blocks)
        match draw.randrange(3):
            case 0:
                handle.suspend(token_ids(blocks), blocks)
            case 1:
                handle.close()
            case 2:
                del kept[number]
                tell(f"dropping {number}")
                handle.close(discard=True)
        return
    blocks = draw.randint(1, 8)
    handle = client.open_session(INT8, MAX_TOKENS)
    writes_cold = draw.random() < 0.7
    demote(client, handle, range(blocks), include_first=True, writes_cold=writes_cold)
    if draw.random() < 0.7:
        handle.suspend(token_ids(blocks), blocks)
        kept[handle.id] = blocks
        tell(f"kept {handle.id} {blocks}")
    else:
        handle.close()


def live(socket: str, seed: int) -> NoReturn:
    """Go on until killed."""
    draw, kept = random.Random(seed), dict[str, int]()
    while True:
        try:
            with Client.connect(socket) as client:
                while True:
                    act(client, kept, draw)
        except TierdError:  # the daemon has gone, or a tier is full: again
            time.sleep(0.02)
