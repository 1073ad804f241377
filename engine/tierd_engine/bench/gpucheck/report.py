"""What a check found, as JSON and as Markdown, with the bars and whether each holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STREAM_MIN, RESIDENT_MAX, VRAM_SHARE_MAX = 0.85, 1.1, 0.03
DRY_LINE = "DRY RUN on the fake device: no hardware was measured, the figures mean nothing."


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `figure` None: not measured. `holds` None: not judged."""

    name: str
    figure: float | None
    limit: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        """One word."""
        return {True: "holds", False: "MISSED", None: "not judged"}[self.holds]


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return the issue's bars, judged unless the run was a dry one."""
    done: dict[str, Any] = found["parts"]
    judged = not found["dry_run"]
    listed = [
        _limit("int8 stream, of the PCIe limit", _stream(done), STREAM_MIN, judged, at_least=True),
        _limit(
            "resident path, x PyTorch's own decode attention",
            _figure(done, "resident", "ratio"), RESIDENT_MAX, judged, at_least=False,
        ),
    ]  # fmt: skip
    for codec in ("int8", "k8v4", "raw"):
        listed.append(
            _limit(
                f"peak VRAM, {codec}, of weights + hot + staging", _vram(done, codec),
                1 + VRAM_SHARE_MAX, judged, at_least=False,
            )
        )  # fmt: skip
    for part, what, limit in (
        ("kernels", "kernels are the CPU's", "every row"),
        ("resident", "the resident path's o is PyTorch's", "within its rounding"),
        ("model", "tokens and fidelity", "every row"),
        ("sanitizer", "compute-sanitizer's memcheck", "no error"),
    ):
        listed.append(Bar(what, None, limit, _figure(done, part, "holds")))
    return listed


def _limit(name: str, figure: float | None, limit: float, judged: bool, *, at_least: bool) -> Bar:
    text = f"{'>=' if at_least else '<='} {limit:g}"
    if figure is None or not judged:
        return Bar(name, figure, text, None)
    return Bar(name, figure, text, figure >= limit if at_least else figure <= limit)


def _figure(done: dict[str, Any], part: str, name: str) -> Any:
    return (done.get(part) or {}).get("result", {}).get(name)


def _stream(done: dict[str, Any]) -> float | None:
    rows = _figure(done, "decode int8", "rows") or []
    return next((row["of_pcie_up"] for row in rows if row["plan"] == "stream"), None)


def _vram(done: dict[str, Any], codec: str) -> float | None:
    vram = _figure(done, f"decode {codec}", "vram")
    if not vram or vram["peak_bytes"] is None:
        return None
    allowed = vram["weights_bytes"] + vram["hot_bytes"] + vram["staging_bytes"]
    return float(vram["peak_bytes"] / allowed)


def write_report(folder: Path, found: dict[str, Any]) -> None:
    """Write gpu-check.json and gpu-check.md; after every part, so that what is done stays."""
    listed = bars(found)
    whole = {
        **found,
        "bars": [
            {"name": bar.name, "figure": bar.figure, "limit": bar.limit, "verdict": bar.verdict}
            for bar in listed
        ],
    }
    (folder / "gpu-check.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "gpu-check.md").write_text("\n".join(_markdown(found, listed)) + "\n")


def _markdown(found: dict[str, Any], listed: list[Bar]) -> list[str]:
    lines = [f"# gpu-check: {found['device']}, {found['date']}", "", found["machine"], ""]
    if found["dry_run"]:
        lines += [DRY_LINE, ""]
    lines += ["| bar | figure | limit | |", "|---|---|---|---|"]
    lines += [f"| {b.name} | {_number(b.figure)} | {b.limit} | {b.verdict} |" for b in listed]
    lines += ["", "| part | seconds | |", "|---|---|---|"]
    for name, part in found["parts"].items():
        lines.append(f"| {name} | {part['seconds']:.0f} | {part.get('said') or 'done'} |")
    lines += _tables(found["parts"])
    return lines


def _tables(done: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    links = (done.get("links") or {}).get("result")
    if links:
        lines += ["", "## Links", ""]
        lines += [
            f"- {name.removesuffix('_bytes_per_second')}: {value / 1e9:.2f} GB/s"
            for name, value in links.items()
            if name.endswith("_bytes_per_second") and value is not None
        ]
    for name, part in done.items():
        result = part.get("result") or {}
        rows = result.get("rows")
        if rows:
            lines += ["", f"## {name}", "", *_table(rows)]
        elif result and name != "links":
            flat = {key: value for key, value in result.items() if not isinstance(value, dict)}
            lines += ["", f"## {name}", "", *_table([flat])]
    return lines + _paths(done)


def _paths(done: dict[str, Any]) -> list[str]:
    """Say which way cold pages took into VRAM, and demoted ones out of it."""
    cold, written = _figure(done, "cold", "device"), _figure(done, "cold", "written")
    if not cold:
        return []
    lines = ["", "Paths of cold pages into VRAM:", ""]
    lines += [
        f"- disk {path['disk']}: {path['kind']} {path['reason']}".rstrip()
        for path in cold["cold_paths"]
    ]
    lines += ["", "Paths of demoted pages from VRAM to a disk:", ""]
    lines += [
        f"- disk {path['disk']}: {path['writes'] or 'not tried'} {path['writes_reason']}".rstrip()
        for path in cold["cold_paths"]
    ]
    direct = written["direct"] or {"pages": 0, "bytes": 0, "errors": 0, "given_up": "no path"}
    lines.append(
        f"- {direct['pages']} pages ({direct['bytes'] / 1e6:.4g} MB) were taken from VRAM, "
        f"{max(written['pages'] - direct['pages'], 0)} from RAM; {direct['errors']} writes failed"
        f"{'; given up: ' + direct['given_up'] if direct['given_up'] else ''}"
    )
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return head + ["| " + " | ".join(_number(row.get(n)) for n in names) + " |" for row in rows]


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")
