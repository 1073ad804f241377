"""A job's report as tables. A figure that a report does not have is shown as "-"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tierd.cli.terminal import figure, print_table, size

Section = Mapping[str, Any]


def print_report(report: Section) -> None:
    """Draw a job's report (JobReport.to_dict) on stdout."""
    print_table(
        "Tiers",
        ["tier", "pages", "bytes", "share", "read per token", "peak", "budget", "moved"],
        _tier_rows(report),
    )
    print_table("Job", ["", ""], _job_rows(report), text_columns=2)
    print_table("Checks", ["", ""], _check_rows(report), text_columns=2)


def _tier_rows(report: Section) -> Iterator[list[str]]:
    moves = {"hot": "demotions", "warm": "spills", "cold": "promotions"}
    for tier, move in moves.items():
        section = _section(report, tier)
        yield [
            tier,
            figure(section.get("pages")),
            size(section.get("bytes")),
            figure(section.get("share"), ".0%"),
            figure(section.get("pages_read_per_token"), ",.1f"),
            size(section.get("peak_bytes")),
            size(section.get("budget_bytes")),
            f"{figure(section.get(move))} {move}",
        ]


def _job_rows(report: Section) -> Iterator[tuple[str, str]]:
    prefill, decode = _section(report, "prefill"), _section(report, "decode")
    yield "prefill", _speed(prefill)
    yield "decode", _decode_speed(decode)
    yield "calls to the daemon in a decode step", figure(decode.get("rpc_per_step"), ",.2f")
    hot = _section(report, "hot")
    peak, budget = figure(hot.get("peak_bytes")), figure(hot.get("budget_bytes"))
    yield "peak of the hot tier", f"{peak} of {budget} bytes"
    yield "model", f"{report.get('model', '-')}, {report.get('dtype', '-')}"
    yield "codec", str(report.get("codec", "-"))
    yield from _guard_rows(_section(report, "guard"))
    yield "plan", f"{report.get('plan', '-')}, blocks of {report.get('block_tokens', '-')} tokens"
    yield "KV", size(report.get("kv_bytes"))
    yield from _device_rows(_section(report, "device"))
    yield "cold tier", str(_section(report, "cold").get("device") or "-")
    yield from _written_rows(_section(_section(report, "cold"), "written"))
    session = _section(report, "session")
    if session.get("kept"):
        yield "kept as", f"{session.get('id', '-')} (ask more with --resume)"


def _written_rows(written: Section) -> Iterator[tuple[str, str]]:
    pages, failures = written.get("pages"), written.get("failures")
    if pages or failures:
        failed = f"; {figure(failures)} times the disk did not take them" if failures else ""
        yield "demoted past warm", f"{figure(pages)} pages, {size(written.get('bytes'))}{failed}"


def _device_rows(device: Section) -> Iterator[tuple[str, str]]:
    """The GPU, and what of the warm tier is not pinned there: such copies are slower."""
    if not device:
        return
    yield "device", str(device.get("name", "-"))
    pageable = device.get("pageable_bytes")
    text = f"{size(device.get('pinned_bytes'))} pinned"
    if pageable:
        text += f", {size(pageable)} NOT: {device.get('pageable_reason') or '-'}"
    yield "warm tier", text
    share = figure(device.get("near_share"), ".0%")
    yield "streamed to it", f"{size(device.get('streamed_bytes'))}; the CPU's share: {share}"


def _guard_rows(guard: Section) -> Iterator[tuple[str, str]]:
    """What the quality guard found, and why layers got a better codec: one row a change."""
    if not guard:
        return
    measured = guard.get("source") == "measured"
    if measured:
        names = ("kl_asked", "kl_chosen", "kl_limit")
        asked_kl, chosen_kl, limit = (figure(guard.get(name), ".1e") for name in names)
        rose = f", with the changes below {chosen_kl}" if guard.get("raised") else ""
        took = figure(1000 * guard.get("seconds", 0.0), ",.0f", " ms")
        verdict = (
            f"where the text repeats itself KL would be {asked_kl}{rose}; "
            f"{limit} is allowed ({took})"
        )
    else:
        verdict = ": ".join(str(guard[key]) for key in ("source", "why") if key in guard) or "-"
    yield "quality guard", verdict
    changes: dict[tuple[str, str], list[Section]] = {}
    for row in guard.get("raised", []):
        changes.setdefault((row["asked"], row["chosen"]), []).append(row)
    for (asked, chosen), rows in changes.items():
        layers = ", ".join(str(row["layer"]) for row in rows)
        why = f": {asked} costs up to {max(row['kl'] for row in rows):.1e}" if measured else ""
        yield f"{asked} to {chosen}", f"layer{'s' * (len(rows) > 1)} {layers}{why}"
    if guard.get("followed") is False:
        yield "not followed", "the warm tier cannot hold a block of these codecs"


def _speed(section: Section) -> str:
    rate = figure(section.get("tokens_per_second"), ",.1f", " tokens/s")
    seconds = figure(section.get("seconds"), ",.1f", " s")
    return f"{rate} ({figure(section.get('tokens'))} tokens in {seconds})"


def _decode_speed(section: Section) -> str:
    """A step makes one token; the first token is prefill's."""
    rate = figure(section.get("tokens_per_second"), ",.1f", " tokens/s")
    seconds = figure(section.get("seconds"), ",.1f", " s")
    steps = figure(section.get("steps"))
    return f"{rate} ({steps} steps in {seconds}; {figure(section.get('tokens'))} tokens in all)"


def _check_rows(report: Section) -> Iterator[tuple[str, str]]:
    hot = _section(report, "hot")
    peak, budget = hot.get("peak_bytes"), hot.get("budget_bytes")
    if isinstance(peak, int) and isinstance(budget, int):
        yield "hot within its budget", "yes" if peak <= budget else "NO"
    for name, value in _section(report, "checks").items():
        yield name.replace("_", " "), _plain(value)
    verify = _section(report, "verify")
    if not verify:
        yield "against the model's own cache", "not run (--verify)"
        return
    yield "tokens identical to the model's own cache", _plain(verify.get("tokens_identical"))
    yield "first differing token", _plain(verify.get("first_difference"), absent="none")
    yield "KL of the logits, mean", figure(verify.get("kl_mean"), ".2e")
    yield "KL of the logits, 99th percentile", figure(verify.get("kl_p99"), ".2e")
    yield "top-1 agreement", figure(verify.get("top1"), ".1%")
    yield "largest difference of a logit", figure(verify.get("logit_difference_max"), ".2e")
    yield "prefill, against the model's own", figure(verify.get("prefill_ratio_to_own"), ".2f", "x")
    yield "decode, against the model's own", figure(verify.get("decode_ratio_to_own"), ".2f", "x")


def _plain(value: object, *, absent: str = "-") -> str:
    if value is None:
        return absent
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return figure(value) if isinstance(value, int) else str(value)


def _section(report: Section, name: str) -> Section:
    value = report.get(name)
    return value if isinstance(value, Mapping) else {}
