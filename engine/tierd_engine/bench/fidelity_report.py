"""What `scripts/bench fidelity` shows: a table on stdout, a Markdown file, a plot."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tierd_engine.bench.fidelity import (
    ALL_TEXTS,
    BARS,
    FidelityPlan,
    FidelityResult,
    FidelityRow,
    Verdict,
    judged,
)
from tierd_engine.bench.forced import Protocol
from tierd_engine.bench.layouts import PagesHeld
from tierd_engine.bench.machine import describe_machine

TABLE_FILE = "fidelity.md"
PLOT_FILE = "fidelity.png"

_PROTOCOLS = {
    Protocol.TIERS: "the prefill itself runs over encoded pages: what a job gets, where the layout "
    "says `+guard` (a job's default)",
    Protocol.PREFIX: "the prefix's exact keys and values are encoded once: the design's protocol",
}
_HEAD = (
    "layout", "plan:hot:block", "protocol", "text", "context", "KL mean", "bar", "KL p99",
    "Δppl [95 %]", "top-1", "bits", "verdict",
)  # fmt: skip


def print_fidelity(plan: FidelityPlan, result: FidelityResult) -> None:
    """Print the judged rows as a table on stdout, which bars hold, and what is missing."""
    rows = result.rows
    print(f"fidelity, SmolLM2-135M float32; {describe_machine()}")
    print(f"{plan.tokens} forced tokens a text and context; texts: {', '.join(plan.texts)}")
    cells = [_HEAD, *map(_cells, judged(rows))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for line in (*conclusions(rows), *pages_lines(rows), *missing_lines(result)):
        print(line)


def conclusions(rows: Sequence[FidelityRow]) -> list[str]:
    """Return a sentence for each codec with a bar, plan and protocol: where it holds."""
    lines = []
    groups: dict[tuple[str, str, str], list[FidelityRow]] = {}
    for row in judged(rows):
        if row.bar_name in BARS:
            groups.setdefault((row.layout, row.setting, row.protocol), []).append(row)
    for (layout, setting, protocol), group in groups.items():
        parts = [f"{row.context_tokens:,}: {_verdict(row)}" for row in group]
        lines.append(f"{layout}, {setting}, protocol {protocol}: {'; '.join(parts)}")
    return lines


def pages_lines(rows: Sequence[FidelityRow]) -> list[str]:
    """Return a line for each text of a layout whose layers differ, or may: who got what."""
    return [
        f"{row.layout}, {row.setting}, protocol {row.protocol}, {row.text}, "
        f"{row.context_tokens:,}: {_held(row, held)}"
        for row in rows
        if row.text != ALL_TEXTS and row.layout != row.bar_name
        for held in row.held.values()
    ]


def _held(row: FidelityRow, held: PagesHeld) -> str:
    said = (
        f"{held.codecs}; {held.token_bytes:,.0f} bytes a token, {held.element_bits:.2f} bits an "
        f"element (as asked {held.asked_token_bytes:,.0f} bytes, int8 {held.int8_token_bytes:,.0f})"
    )
    if held.kl_asked is None or held.kl_chosen is None:
        return said
    return (
        f"{said}; the guard took KL for {held.kl_asked:.1e} and chose "
        f"{held.kl_chosen:.1e}; it is {row.summary.kl_mean:.1e}"
    )


def missing_lines(result: FidelityResult) -> list[str]:
    """Return a line for each run that failed."""
    return [f"missing: {run}" for run in result.missing]


def _verdict(row: FidelityRow) -> str:
    if row.verdict in (Verdict.FAILS, Verdict.UNSURE):
        return f"{row.verdict.value} ({', '.join(row.misses)})"
    return row.verdict.value


def _cells(row: FidelityRow) -> tuple[str, ...]:
    summary = row.summary
    low, high = summary.perplexity_change_low, summary.perplexity_change_high
    return (
        row.layout,
        row.setting,
        row.protocol,
        row.text,
        f"{row.context_tokens:,}",
        f"{summary.kl_mean:.2e}",
        f"{row.kl_limit:.1e}" if row.kl_limit is not None else "-",
        f"{summary.kl_p99:.2e}",
        f"{summary.perplexity_change:+.3%} [{low:+.3%}, {high:+.3%}]",
        f"{summary.top1:.2%}",
        f"{row.element_bits:.2f}" if row.element_bits is not None else "-",
        _verdict(row),
    )


def markdown(plan: FidelityPlan, result: FidelityResult) -> str:
    """Return the whole report as Markdown."""
    return "\n".join(_markdown_lines(plan, result)) + "\n"


def _markdown_lines(plan: FidelityPlan, result: FidelityResult) -> Iterator[str]:
    rows = result.rows
    yield "# Fidelity"
    yield ""
    yield f"SmolLM2-135M in float32, teacher-forced, {plan.tokens} tokens after each context."
    yield f"Texts: {', '.join(plan.texts)} (CPython's language reference by kind, and `source`"
    yield "of its library)."
    yield f"Made by `scripts/bench fidelity` on {describe_machine()}."
    yield "A 135M model trained to 8k tokens: no claim about quality at longer contexts."
    yield ""
    for protocol in plan.protocols:
        yield f"- protocol `{protocol.value}`: {_PROTOCOLS[protocol]}"
    yield "- `smallest`: two blocks hot (the attention sinks' and the open one); `q8_0`: the layout"
    yield "  of llama.cpp's cache, as a reference, demoted at the same moments"
    yield "- bits: of an element below hot, scales and all; the first block, which is exact, apart"
    yield "- Δppl: relative, paired, with a block-bootstrap interval; `unsure`: only it is beyond"
    yield "  its bar, and the interval reaches within"
    for heading, wanted in (("All texts together", True), ("Text by text", False)):
        yield ""
        yield f"## {heading}"
        yield ""
        yield "| " + " | ".join(_HEAD) + " |"
        yield "|" + "---|" * len(_HEAD)
        for row in rows:
            if (row.text == ALL_TEXTS) is wanted:
                yield "| " + " | ".join(_cells(row)) + " |"
        if wanted:
            yield ""
            lines = (*conclusions(rows), *pages_lines(rows), *missing_lines(result))
            yield from (f"- {line}" for line in lines)


def write_table(folder: Path, plan: FidelityPlan, result: FidelityResult) -> Path:
    """Write the Markdown file into a folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / TABLE_FILE
    table.write_text(markdown(plan, result), encoding="utf-8")
    return table


def write_report(folder: Path, plan: FidelityPlan, result: FidelityResult) -> list[Path]:
    """Write the table, and the plot where matplotlib is installed; return the files written."""
    table = write_table(folder, plan, result)
    if find_spec("matplotlib") is None:
        print(
            "bench: no plot: matplotlib is not installed (pip install 'tierd[bench]')",
            file=sys.stderr,
        )
        return [table]
    plot = folder / PLOT_FILE
    _plot(plot, plan, result.rows)
    return [table, plot]


def _plot(path: Path, plan: FidelityPlan, rows: Sequence[FidelityRow]) -> None:
    """Draw mean KL against the context, one panel a protocol, the bars dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(plan.protocols), figsize=(6 * len(plan.protocols), 5), sharey=True, squeeze=False
    )
    for panel, protocol in zip(panels[0], plan.protocols, strict=True):
        _draw_panel(panel, [row for row in judged(rows) if row.protocol == protocol.value])
        panel.set_title(f"protocol {protocol.value}")
        panel.set_xticks(list(plan.contexts), [f"{context:,}" for context in plan.contexts])
    panels[0][0].set_ylabel("mean KL, nats a token")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(panel: Any, rows: Sequence[FidelityRow]) -> None:
    colours: dict[str, str] = {}
    lines: dict[tuple[str, str], list[FidelityRow]] = {}
    for row in rows:
        if row.layout != "raw":  # exact: 1e-11, far below the scale
            lines.setdefault((row.layout, row.setting), []).append(row)
    for (layout, setting), points in lines.items():
        colour = colours.setdefault(layout, f"C{len(colours)}")
        panel.plot(
            [row.context_tokens for row in points], [row.summary.kl_mean for row in points],
            marker="o", color=colour, label=f"{layout}, {setting}",
        )  # fmt: skip
        if points[0].bar_name in BARS:
            panel.axhline(
                BARS[points[0].bar_name].kl_mean, color=colour, linestyle="--", linewidth=0.8
            )
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_yscale("log")
    panel.set_xlabel("context, tokens")
    panel.legend(fontsize="small")
