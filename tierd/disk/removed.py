"""Removed: what it means that somebody took a part of the cold folder away, and what to do.

The next start makes folders that are missing anew. Which sessions are kept, and where their pages
are, it finds in snap/ and journal/, or, where these have lost it, in kept/; the pages are in slab/.
"""

from __future__ import annotations

from collections.abc import Collection

_INDEX = {"journal", "snap"}
_RECORDS = {*_INDEX, "kept"}
_UNTIL = "nothing more is kept until the daemon is started again"


def folders_gone(folder: str, names: Collection[str]) -> str:
    """Return one line on folders that are gone; "" among `names` is the cold folder itself."""
    if "" in names:
        return (
            f"cold folder {folder} was removed; nothing in it is kept; the next daemon begins with "
            "an empty one"
        )
    listed = ", ".join(sorted(names))
    return f"cold folder {folder}: somebody removed {listed} in it: {_lost_with(names)}; {_UNTIL}"


def segment_gone(folder: str, name: str) -> str:
    """Return one line on the journal's newest file, which is gone."""
    return f"cold folder {folder}: somebody removed {name}: {_lost_with(['journal'])}; {_UNTIL}"


def lock_gone(folder: str) -> str:
    """Return one line on LOCK, which is gone: a second owner would find nobody's lock."""
    return (
        f"cold folder {folder}: somebody removed LOCK in it: another daemon could write there at "
        f"the same time; {_UNTIL}"
    )


def folders_moved(folder: str, names: Collection[str]) -> str:
    """Return one line on folders that stand elsewhere."""
    listed = "it" if "" in names else ", ".join(sorted(names))
    return (
        f"cold folder {folder}: somebody moved {listed}: the next daemon does not find what is "
        "kept; move it back and start the daemon again"
    )


def _lost_with(names: Collection[str]) -> str:
    lost = []
    left = " and ".join(f"{name}/" for name in sorted(_RECORDS - set(names)))
    if not left:
        lost.append("the next daemon knows of no session that was kept")
    elif not _INDEX.isdisjoint(names):
        lost.append(f"the next daemon looks for what is kept in {left} alone")
    elif "kept" in names:
        lost.append("the next daemon finds what was kept, written down once instead of twice")
    if "slab" in names:
        lost.append("the pages of kept sessions are gone, and computed anew as one is resumed")
    return ", ".join(lost)
