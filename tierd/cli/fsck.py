"""`tierd fsck`: check a cold folder that no daemon has open, and mend its index."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierd.cli import checks, exits, options
from tierd.cli.streams import writing
from tierd.cli.terminal import print_json, print_table, versioned
from tierd.errors import NotFound

if TYPE_CHECKING:
    from tierd.disk.fsck import DamagedPage, FsckReport

Folder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        callback=options.checked("FOLDER", checks.named),
        help="The cold folder of a daemon.",
    ),
]
Rebuild = Annotated[
    bool,
    typer.Option(
        "--rebuild",
        help="Drop what is damaged and write the index anew; where the journal and the snapshots "
        "are lost, from the slots and what is written down of each kept session.",
    ),
]
LINES_MAX = 20  # of each kind of finding; --json has all of them


def fsck(folder: Folder, rebuild: Rebuild = False, as_json: options.AsJson = False) -> None:
    """Check every record and every page of a cold folder.

    Exit 0: clean, or all mended; 1: damage was found, or is left.
    """
    from tierd.clock import SystemClock
    from tierd.disk import fsck as fscks
    from tierd.disk.posix import PosixDisk

    place = Path(folder).expanduser()
    if not any((place / name).exists() for name in ("superblock", "journal")):
        raise NotFound(f"{folder}: there is no store here")
    with PosixDisk(str(place), ephemeral=False) as disk:
        report = (fscks.rebuild if rebuild else fscks.check)(disk, SystemClock())
    if as_json:
        print_json(versioned(clean=report.clean, sound=report.sound, **_named(report)))
    else:
        _show(report)
    if not report.sound:
        raise typer.Exit(exits.FAILED)


def _named(report: FsckReport) -> dict[str, Any]:
    """Return a report's fields with sessions by their names, as other commands print them.

    A damaged page's `file` is its slab's, whose number stays beside it.
    """
    from tierd.disk.slabfiles import slab_name

    found = asdict(report)
    for name in ("restored", "unmanifested", "once_only", "unresumable"):
        found[name] = [f"{number:016x}" for number in found[name]]
    for name in ("lost", "strays"):
        found[name] = [(f"{number:016x}", count) for number, count in found[name]]
    for name in ("pages", "unkept_pages"):
        found[name] = [
            {**page, "session": f"{page['session']:016x}", "file": slab_name(page["slab"])}
            for page in found[name]
        ]
    return found


def _show(report: FsckReport) -> None:
    figures = {
        "sessions": report.sessions,
        "slabs": report.slabs,
        "pages checked": report.pages_checked,
        "pages damaged": len(report.pages),
        "slots that no record names": report.unnamed,
    }
    rows = [
        ("store", report.store_uuid or "-"),
        # Of a store without a superblock nothing was looked at.
        *((what, f"{count:,d}" if report.store_uuid else "-") for what, count in figures.items()),
        ("index", "written anew" if report.rebuilt else "unchanged"),
    ]
    print_table("Store", ["", ""], rows, text_columns=2)
    with writing() as out:
        for lines in _findings(report):
            for line in lines[:LINES_MAX]:
                print(line, file=out)
            if len(lines) > LINES_MAX:
                print(f"... and {len(lines) - LINES_MAX:,d} more", file=out)
        print(_verdict(report), file=out)


def _verdict(report: FsckReport) -> str:
    if report.clean:
        return "clean"
    if not report.rebuilt:
        anew = "; a resume computes damaged pages anew" if report.pages or report.lost else ""
        return f"damage was found{anew}{_may_be_lost(report)}; --rebuild mends what can be"
    if not report.sound:
        return "damage was found, and not all of it is mended"
    lost = f"; {len(report.lost)} sessions lost KV, named above" if report.lost else ""
    lost += _may_be_lost(report)
    return f"damage was found, and mended{lost or ', nothing lost'}"


def _may_be_lost(report: FsckReport) -> str:
    return f"; {len(report.strays)} sessions may be lost, named above" if report.strays else ""


def _page(page: DamagedPage) -> str:
    from tierd.disk.slabfiles import slab_name

    where = f"{slab_name(page.slab)}, slot {page.slot}"
    return f"page: session {page.session:016x} {page.reason} ({where})"


def _findings(report: FsckReport) -> list[list[str]]:
    pages = [f"found: {_page(page)}" for page in report.pages]
    unkept = [f"note: {_page(page)}; it was never kept" for page in report.unkept_pages]
    lost = [
        f"lost: session {number:016x}: its KV from token {token:,d} on; the next resume computes "
        "it anew from the token ids"
        for number, token in report.lost
    ]
    lost += [
        f"lost: session {number:016x}: all of it, from token 0 on: its token ids are lost, nothing "
        "can resume it"
        for number in report.unresumable
    ]
    strays = [
        f"lost?: session {number:016x}: {slots:,d} slots hold pages of it, and no record is left "
        "that says whether it was kept; if it was, it is lost, and nothing can resume it"
        for number, slots in report.strays
    ]
    return [
        [f"found: {what}" for what in report.damage],
        pages,
        [f"mended: {what}" for what in report.mended],
        [f"left: {what}" for what in report.left],
        lost,
        strays,
        unkept,
        [f"note: {note}" for note in [*_once_only(report), *report.notes]],
    ]


def _once_only(report: FsckReport) -> list[str]:
    count = len(report.once_only)
    if not count or report.rebuilt:  # that has written what it could
        return []
    return [
        f"kept sessions that have no file in kept/: {count:,d}. They are written down once, not "
        "twice: nothing of them is lost, and --rebuild writes the files anew"
    ]
