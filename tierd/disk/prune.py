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

from tierd.disk.image import Image, Places
from tierd.disk.records import Keys, SessionRecord, page_keys

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Pruned:
    """What was taken out of the image. `rows` are left; `lost`: (session, first lost token).

    `unkept`: the same of what no suspension has kept. `empty_slabs`: those missing that no page
    of a kept block names.
    """

    rows: int = 0
    drops: list[tuple[int, Keys]] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)  # pages of no session
    cut: list[SessionRecord] = field(default_factory=list)
    truncated: list[tuple[int, int]] = field(default_factory=list)  # (session, first block)
    missing_slabs: list[int] = field(default_factory=list)
    empty_slabs: list[int] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    unkept: list[tuple[int, int]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    dropped_pages: int = 0


def prune(image: Image, slab_files: Collection[int]) -> Pruned:
    """Take out of `image` what cannot be; `slab_files` are the slabs whose files are there."""
    pruned = Pruned()
    for number in sorted(set(image.pages) - set(image.sessions)):
        pruned.orphans.append(number)
        pruned.dropped_pages += len(image.rows_of_session(number))
        image.drop_session(number)
    counts = image.row_counts()
    bad = _misplaced(image, counts, slab_files, pruned)
    needed = _drop(image, counts, bad, pruned)
    for slab in sorted(set(image.slabs) - set(slab_files)):
        pruned.missing_slabs.append(slab)
        if slab not in needed:
            pruned.empty_slabs.append(slab)
        image.drop_slab(slab)
    for session in list(image.sessions.values()):
        if session.state == "parked":
            _cut_at_gap(image, session, pruned)
    pruned.rows = sum(image.row_counts().values())
    return pruned


def _misplaced(
    image: Image, counts: dict[int, int], slab_files: Collection[int], pruned: Pruned
) -> Mask:
    """Return which rows name a slab, a slot or a namespace that cannot be theirs."""
    places = Places(image.slabs.values())
    slabs, slots = image.column("slab"), image.column("slot")
    unknown = ~places.known(slabs)
    beyond = ~unknown & ~places.inside(slabs, slots)
    foreign = ~unknown & _foreign(image, counts, places.row_of(slabs))
    present = Places(s for s in image.slabs.values() if s.slab in slab_files)
    missing = ~unknown & ~present.known(slabs)
    bad: Mask = unknown | beyond | foreign
    doubled = _doubled(image, places.of(slabs, slots), bad)
    for mask, what in (
        (unknown, "in slabs that no record names"),
        (beyond, "in slots beyond the end of a slab"),
        (foreign, "in slabs of another namespace"),
        (doubled, "in slots of other pages"),
    ):
        if count := int(np.count_nonzero(mask)):
            pruned.damage.append(f"{count} pages {what}")
    return bad | doubled | missing


def _foreign(image: Image, counts: dict[int, int], slab_rows: npt.NDArray[np.intp]) -> Mask:
    """Return which rows stand in a slab of another namespace than their session's."""
    names = {
        digest: n for n, digest in enumerate({s.namespace_digest for s in image.slabs.values()})
    }
    by_slab = np.full(max(image.slabs, default=0) + 2, -1)
    for slab in image.slabs.values():
        by_slab[slab.slab] = names[slab.namespace_digest]
    digests = {
        namespace: namespace.digest()
        for namespace in {image.sessions[number].namespace for number in counts}
    }
    own = [names.get(digests[image.sessions[number].namespace], -2) for number in counts]
    row_names = np.repeat(np.array(own, np.int64), np.array(list(counts.values()), np.int64))
    foreign: Mask = by_slab[slab_rows] != row_names
    return foreign


def _doubled(image: Image, places: npt.NDArray[np.int64], bad: Mask) -> Mask:
    """Return which rows, bad ones aside, name a slot that a row of a higher generation names."""
    doubled: Mask = np.zeros(len(bad), bool)
    good = places if not bad.any() else places[~bad]
    if len(good) and int(np.count_nonzero(np.bincount(good))) < len(good):
        index = np.flatnonzero(~bad)
        order = index[np.lexsort((image.column("generation")[index], good))]
        doubled[order[:-1]] = places[order[1:]] == places[order[:-1]]
    return doubled


def _drop(image: Image, counts: dict[int, int], bad: Mask, pruned: Pruned) -> set[int]:
    """Drop the bad rows; return the slabs that those of kept blocks name."""
    needed: set[int] = set()
    pruned.dropped_pages += int(np.count_nonzero(bad))
    if not bad.any():
        return needed
    ends = np.cumsum(list(counts.values())).tolist()
    for number, count, end in zip(counts, counts.values(), ends, strict=True):
        own = image.rows_of_session(number)[bad[end - count : end]]
        if not len(own):
            continue
        keys = page_keys(own)
        pruned.drops.append((number, keys))
        image.drop_pages(number, keys)
        session = image.sessions[number]
        kept = own[own["block"] < session.kept_blocks]
        needed.update(kept["slab"].tolist())
        if session.state != "parked":
            first = int(own["block"].min())
            lost = pruned.lost if len(kept) else pruned.unkept
            lost.append((number, first * session.namespace.geometry.block_tokens))
    return needed


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
