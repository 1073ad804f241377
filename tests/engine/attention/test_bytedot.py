"""Sums of 8-bit codes as integers: against the float64 reference and the steps by floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.attention.test_attend import HEAD_DIMS, TOLERANCE, Case, draw, draw_full
from tierd.types import CodecId, DType
from tierd_engine.attention import bytedot, cpu, kernel, works
from tierd_engine.attention.operator import attend_reference

INT8, K8V4 = CodecId.INT8, CodecId.K8V4
DOT_HEAD_DIMS = (64, 65, 80, 96, 112, 128, 200)

Choose = Callable[[bool], None]

needs_the_instruction = pytest.mark.skipif(
    not bytedot.is_built_for(), reason="this processor has no vpdpbusd"
)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says whether calls from here on may sum integers."""

    def choose(by_integers: bool) -> None:
        monkeypatch.setattr(bytedot, "is_built_for", lambda: by_integers)
        cpu._workspace.jobs.clear()

    yield choose
    cpu._workspace.jobs.clear()


def _errors(case: Case, out: Any, lse: Any) -> tuple[float, float]:
    """The largest errors of o and lse; a page of which nothing is seen is to be empty."""
    errors = [(0.0, 0.0)]
    for page, count in enumerate(case.tokens):
        if count == 0:
            assert (out[page] == 0.0).all() and np.isneginf(lse[page]).all()
            continue
        keys, values = case.pages.keys[page][:, :count], case.pages.values[page][:, :count]
        expected = attend_reference(case.q, keys, values, case.scale)
        assert np.isfinite(out[page]).all() and np.isfinite(lse[page]).all()
        o_error, lse_error = np.abs(out[page] - expected.o), np.abs(lse[page] - expected.lse)
        errors.append((float(o_error.max()), float(lse_error.max())))
    return max(o for o, _ in errors), max(lse for _, lse in errors)


def _errors_of_row(case: Case, page: int, row: int, out: Any, lse: Any) -> tuple[float, float]:
    count = case.tokens[page]
    keys, values = case.pages.keys[page][:, :count], case.pages.values[page][:, :count]
    expected = attend_reference(case.q, keys, values, case.scale)
    o_error = np.abs(out[page, 0, row] - expected.o[0, row]).max()
    return float(o_error), float(abs(lse[page, 0, row] - expected.lse[0, row]))


def _draw_visible(rng: np.random.Generator, codec: CodecId, d: int, share: int) -> Case:
    case = draw(rng, codec, DType.BFLOAT16, 1, 2, share, d, int(rng.choice([64, 256])))
    case.first = case.last = None
    return case


@pytest.mark.parametrize("share", (1, 3))
def test_steps_by_floats_match_the_reference_on_every_processor(share: int, choose: Choose) -> None:
    choose(False)
    rng = np.random.default_rng()
    for d in HEAD_DIMS:
        draw(rng, INT8, DType.BFLOAT16, 1, 2, share, d, int(rng.choice([64, 128, 256]))).check()
    for d in (32, 64, 128):
        draw(rng, K8V4, DType.BFLOAT16, 1, 2, share, d, int(rng.choice([64, 128, 256]))).check()


@needs_the_instruction
@pytest.mark.parametrize("share", (1, 2, 3, 4))
def test_sums_of_integers_match_the_reference_and_the_steps_by_floats(
    share: int, choose: Choose
) -> None:
    rng = np.random.default_rng()
    for codec, dims in ((INT8, DOT_HEAD_DIMS), (K8V4, (32, 64, 160))):
        for d in dims:
            case = _draw_visible(rng, codec, d, share)
            choose(True)
            by_integers = case.run()
            choose(False)
            by_floats = case.run()
            assert max(_errors(case, *by_integers)) < TOLERANCE
            for mine, theirs in zip(by_integers, by_floats, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=TOLERANCE, rtol=1e-6)


def _one_channel_a_thousand_times_the_others(case: Case) -> None:
    case.q[..., 7] *= 1000.0
    case.q /= 100.0


def _one_token_outweighs_the_others(case: Case) -> None:
    case.q *= 8.0


def _all_tokens_weigh_the_same(case: Case) -> None:
    case.q[:] = 0.0


def _half_of_the_channels_hardly_count(case: Case) -> None:
    case.q[..., ::2] *= np.float32(1e-6)


def _factors_are_subnormal(case: Case) -> None:
    case.q *= np.float32(1e-38)


def _key_parts(case: Case, page: int, head: int) -> tuple[Any, Any]:
    """The scales [groups, d] and codes [groups, d, 64] of a page's keys, where they lie."""
    layout, d = case.pages.layout, case.pages.layout.head_dim
    at = int(case.pages.addresses[page]) - case.pages.memory.ctypes.data + head * layout.head_bytes
    view, groups = case.pages.memory[at : at + layout.head_bytes], layout.block_tokens // 64
    scales = view[layout.key_scale :][: 2 * groups * d].view(np.float16).reshape(groups, d)
    return scales, view[layout.keys :][: groups * d * 64].reshape(groups, d, 64)


def _one_channels_step_is_far_larger(case: Case) -> None:
    """As an outlier among the keys makes it."""
    for page, head in np.ndindex(len(case.tokens), case.pages.layout.kv_heads):
        scales, codes = _key_parts(case, page, head)
        more = 255.0 * scales[:, 7, None].astype(np.float64) * codes[:, 7]
        case.pages.keys[page, head, :, 7] += more.ravel()
        scales[:, 7] *= np.float16(256.0)


def _bounds(case: Case, page: int, row: int) -> tuple[float, float]:
    """How far o and lse of a query head may be off where factors are rounded to their units.

    A factor is off by half a unit, 2^-22 of the largest by a hundredth more, and a code is at most
    255: so each score is, by `off`; weights change by e^(2 off), and are factors themselves.
    """
    half, layout = 2.0**-23 * (129 / 128), case.pages.layout
    head, count = row // (case.q.shape[1] // layout.kv_heads), int(case.tokens[page])
    q, keys = case.q[0, row].astype(np.float64), case.pages.keys[page, head, :count]
    values = case.pages.values[page, head, :count]
    largest = np.abs(q * _key_parts(case, page, head)[0].astype(np.float64)).max() * case.scale
    off = half * 255 * layout.head_dim * largest
    s = keys @ q * case.scale
    p = np.exp(s - s.max())
    p /= p.sum()
    o = p @ values
    step = np.ptp(values, axis=1) / 255 if layout.codec is INT8 else np.zeros(count)
    o_off = np.expm1(2 * off) * np.abs(values - o).max() + half * 255 * count * (p * step).max()
    return o_off, off + 2.0**-22 * np.abs(s).max()  # lse is a float32 as large as scores are


@needs_the_instruction
@pytest.mark.parametrize(
    "change",
    (
        _one_channel_a_thousand_times_the_others,
        _one_channels_step_is_far_larger,
        _one_token_outweighs_the_others,
        _all_tokens_weigh_the_same,
        _half_of_the_channels_hardly_count,
        _factors_are_subnormal,
    ),
)
def test_integers_lose_no_more_than_the_rounding_of_their_factors(
    change: Callable[[Case], None], choose: Choose
) -> None:
    rng = np.random.default_rng()
    choose(True)
    for codec in (INT8, K8V4):
        for case in (_draw_visible(rng, codec, 64, 3) for _ in range(8)):
            change(case)
            out, lse = case.run()
            for page, row in np.ndindex(len(case.tokens), case.q.shape[1]):
                if case.tokens[page]:
                    errors = _errors_of_row(case, page, row, out, lse)
                    for error, bound in zip(errors, _bounds(case, page, row), strict=True):
                        assert error <= bound + TOLERANCE / 4


@needs_the_instruction
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_no_number_in_a_query_or_scale_shows_in_its_rows_only(
    bad: float, choose: Choose
) -> None:
    choose(True)
    case = draw_full(np.random.default_rng(), INT8, 1, 2, 3, 64)
    case.q[0, 1, 5] = bad
    layout, start = case.pages.layout, int(case.pages.addresses[2]) - case.pages.memory.ctypes.data
    at = start + layout.head_bytes + layout.value_scale + 2 * 9
    case.pages.memory[at : at + 2].view(np.float16)[:] = bad
    out, lse = case.run()
    assert np.isnan(out[:, 0, 1]).all() and np.isnan(lse[:, 0, 1]).all()
    assert not np.isfinite(out[2, 0, 3:]).any() and np.isfinite(lse[2, 0, 3:]).all()
    assert np.isfinite(out[2, 0, [0, 2]]).all() and np.isfinite(out[:2, 0, [0, 2, 3, 4, 5]]).all()


@needs_the_instruction
def test_integers_are_summed_where_pages_fit_and_nowhere_else() -> None:
    rng = np.random.default_rng()

    def kind_of(codec: CodecId, d: int, block: int) -> int:
        return works.kind_of(draw(rng, codec, DType.BFLOAT16, 1, 1, 1, d, block).pages.layout)

    assert kind_of(INT8, 64, 64) == kind_of(INT8, 80, 256) == kernel.UINT8_DOT
    assert kind_of(INT8, 48, 256) == kind_of(INT8, 64, 32) == works.UINT8
    assert kind_of(K8V4, 32, 64) == kernel.K8V4_DOT
    assert kind_of(K8V4, 64, 32) == kernel.K8V4
    assert kind_of(CodecId.FP8, 64, 256) == works.E4M3
