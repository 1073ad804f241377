"""Pruning: of what the journal says, only what can be is kept. No I/O.

A row needs a session, a slab that is there, a slot inside it, the session's
namespace, and its slot for itself. A parked session is cut to its gap-free
prefix: its pages from block 0 on, all layers of each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tierd.disk.image import Image
from tierd.disk.records import Keys, Rows, SessionRecord, page_keys

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Pruned:
    """What was taken out of the image. `rows` are left; `lost`: (session, first lost token)."""

    rows: int = 0
    drops: list[tuple[int, Keys]] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)  # pages of no session
    cut: list[SessionRecord] = field(default_factory=list)
    truncated: list[tuple[int, int]] = field(default_factory=list)  # (session, first block)
    missing_slabs: list[int] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    dropped_pages: int = 0


def prune(image: Image, slab_files: Collection[int]) -> Pruned:
    """Take out of `image` what cannot be; `slab_files` are the slabs whose files are there."""
    pruned = Pruned()
    for number in sorted(set(image.pages) - set(image.sessions)):
        pruned.orphans.append(number)
        pruned.dropped_pages += len(image.rows_of_session(number))
        image.drop_session(number)
    rows = image.all_rows()
    bad = _misplaced(image, rows, slab_files, pruned) | _doubled(rows, pruned)
    _drop(image, rows[bad], pruned)
    for slab in sorted(set(image.slabs) - set(slab_files)):
        pruned.missing_slabs.append(slab)
        image.drop_slab(slab)
    for session in list(image.sessions.values()):
        if session.state == "parked":
            _cut_at_gap(image, session, pruned)
    pruned.rows = sum(len(image.rows_of_session(number)) for number in image.pages)
    return pruned


def _misplaced(image: Image, rows: Rows, slab_files: Collection[int], pruned: Pruned) -> Mask:
    """Return which rows name a slab, a slot or a namespace that cannot be."""
    slabs = sorted(image.slabs.values(), key=lambda slab: slab.slab)
    ids = np.array([slab.slab for slab in slabs] or [0], dtype=np.uint32)
    there = np.array([slab.slab in slab_files for slab in slabs] or [False])
    slots = np.array([slab.slots for slab in slabs] or [0], dtype=np.uint32)
    names = {digest: n for n, digest in enumerate({slab.namespace_digest for slab in slabs})}
    slab_names = np.array([names[slab.namespace_digest] for slab in slabs] or [-1])
    sessions = sorted(image.pages)
    of_session = [names.get(image.sessions[n].namespace.digest(), -2) for n in sessions]
    counts = [len(image.pages[n].settle()) for n in sessions]
    row_names = np.repeat(np.array(of_session, dtype=np.int64), np.array(counts, dtype=np.int64))
    place = np.minimum(np.searchsorted(ids, rows["slab"]), len(ids) - 1)
    unknown = ids[place] != rows["slab"]
    beyond = ~unknown & (rows["slot"] >= slots[place])
    foreign = ~unknown & (slab_names[place] != row_names)
    missing = ~unknown & ~there[place]
    for mask, what in (
        (unknown, "in slabs that no record names"),
        (beyond, "in slots beyond the end of a slab"),
        (foreign, "in slabs of another namespace"),
    ):
        if count := int(np.count_nonzero(mask)):
            pruned.damage.append(f"{count} pages {what}")
    bad: Mask = unknown | beyond | foreign | missing
    return bad


def _doubled(rows: Rows, pruned: Pruned) -> Mask:
    """Return which rows name a slot that a row of a higher generation names too."""
    bad: Mask = np.zeros(len(rows), bool)
    places = (rows["slab"].astype(np.uint64) << np.uint64(32)) | rows["slot"]
    ordered = np.sort(places)
    if bool(np.any(ordered[1:] == ordered[:-1])):
        order = np.lexsort((rows["generation"], places))
        bad[order[:-1]] = places[order[1:]] == places[order[:-1]]
        pruned.damage.append(f"{int(np.count_nonzero(bad))} pages in slots of other pages")
    return bad


def _drop(image: Image, rows: Rows, pruned: Pruned) -> None:
    pruned.dropped_pages += len(rows)
    for number in np.unique(rows["session"]).tolist():
        own = rows[rows["session"] == number]
        keys = page_keys(own)
        pruned.drops.append((number, keys))
        image.drop_pages(number, keys)
        session = image.sessions[number]
        if session.state != "parked":
            first = int(own["block"].min())
            pruned.lost.append((number, first * session.namespace.geometry.block_tokens))


def _cut_at_gap(image: Image, session: SessionRecord, pruned: Pruned) -> None:
    rows, layers = image.rows_of_session(session.number), session.namespace.geometry.layers
    places = rows["block"].astype(np.int64) * layers + rows["layer"]
    gaps = np.flatnonzero((places != np.arange(len(rows))) | (rows["layer"] >= layers))
    whole = int(gaps[0]) // layers if len(gaps) else len(rows) // layers
    sealed = min(whole, session.sealed_blocks)
    if sealed < session.sealed_blocks:
        lost_token = sealed * session.namespace.geometry.block_tokens
        pruned.lost.append((session.number, lost_token))
        shorter = replace(session, sealed_blocks=sealed)
        pruned.cut.append(shorter)
        image.sessions[session.number] = shorter
    if len(rows) > sealed * layers:
        pruned.truncated.append((session.number, sealed))
        pruned.dropped_pages += len(rows) - sealed * layers
        image.truncate(session.number, sealed)
