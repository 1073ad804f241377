"""Geometry keeps its bounds; a namespace's digest tells every field's every value apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import InvalidArgument
from tierd.types import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    CodecId,
    DType,
    Geometry,
    Namespace,
    PageKey,
    SessionState,
    Tier,
)

GEOMETRY = Geometry(layers=30, kv_heads=3, head_dim=64, dtype=DType.BFLOAT16)
NAMESPACE = Namespace(
    GEOMETRY, "weights", CodecId.INT8, "main", "adapter", "rope", "ranks", "salt", format_version=1
)
FULL = replace(NAMESPACE, codec_layers="0=raw")  # no field of it is empty
TEXTS = [f.name for f in fields(Namespace) if f.type == "str"]

namespaces = st.builds(
    Namespace,
    geometry=st.builds(
        Geometry,
        layers=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        head_dim=st.integers(1, 3),
        dtype=st.sampled_from(DType),
        block_tokens=st.sampled_from([16, 32]),
    ),
    codec=st.sampled_from(CodecId),
    format_version=st.integers(1, 3),
    **{name: st.sampled_from(["", "a", "b", "ab", "1", "\x01", "\0"]) for name in TEXTS},
)


# -- geometry ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 65536, 2**40])
def test_a_dimension_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value}"):
        replace(GEOMETRY, **{name: value})


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [1, 65535])
def test_the_bounds_themselves_are_allowed(name: str, value: Any) -> None:
    assert getattr(replace(GEOMETRY, **{name: value}), name) == value


@pytest.mark.parametrize("tokens", [0, -16, 1, 8, 15, 17, 100, 255, 4095, 8192, 2**40])
def test_a_block_is_a_power_of_two_from_16_to_4096(tokens: int) -> None:
    with pytest.raises(InvalidArgument, match=f"block_tokens is {tokens}"):
        replace(GEOMETRY, block_tokens=tokens)


def test_every_power_of_two_within_is_a_block() -> None:
    tokens = BLOCK_TOKENS_MIN
    while tokens <= BLOCK_TOKENS_MAX:
        assert replace(GEOMETRY, block_tokens=tokens).block_tokens == tokens
        tokens *= 2


def test_sizes_follow_from_the_shape() -> None:
    assert GEOMETRY.page_bytes == 2 * 3 * 256 * 64 * 2
    assert GEOMETRY.block_bytes == 30 * GEOMETRY.page_bytes
    assert GEOMETRY.token_bytes == 2 * 30 * 3 * 64 * 2
    assert replace(GEOMETRY, dtype=DType.FLOAT32).page_bytes == 2 * GEOMETRY.page_bytes
    assert replace(GEOMETRY, dtype=DType.FLOAT16).page_bytes == GEOMETRY.page_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2)])
def test_the_last_block_may_be_partly_full(tokens: int, blocks: int) -> None:
    assert GEOMETRY.blocks_for(tokens) == blocks


# -- namespace --------------------------------------------------------------------


def other_values(value: object) -> list[Any]:
    """Return values of the same field that differ from `value`."""
    match value:
        case DType():
            return [dtype for dtype in DType if dtype is not value]
        case CodecId():
            return [codec for codec in CodecId if codec is not value]
        case int():
            return [value * 2, value * 4]
        case str():
            return ["", value + " ", value[:-1], value.upper(), value + "\0"]
    raise AssertionError(value)


def neighbours(namespace: Namespace) -> Iterator[Namespace]:
    """Yield namespaces that differ in exactly one field."""
    for field in fields(Namespace):
        if field.name != "geometry":
            for value in other_values(getattr(namespace, field.name)):
                yield replace(namespace, **{field.name: value})
    for field in fields(Geometry):
        for value in other_values(getattr(namespace.geometry, field.name)):
            yield replace(namespace, geometry=replace(namespace.geometry, **{field.name: value}))


def test_each_changed_field_is_another_namespace() -> None:
    digests = [FULL.digest(), *(other.digest() for other in neighbours(FULL))]
    assert len(digests) > 40
    assert len(set(digests)) == len(digests)


def test_a_digest_covers_every_field_there_is() -> None:
    own = {f.name for f in fields(Namespace)} - {"geometry"}
    shape = {f"geometry.{f.name}" for f in fields(Geometry)}
    assert {name for name, _ in FULL.canonical()} == own | shape


def test_a_namespace_without_exceptions_is_named_as_before_there_were_any() -> None:
    own = {name for name, _ in FULL.canonical()} - {name for name, _ in NAMESPACE.canonical()}
    assert own == {"codec_layers"}


def test_what_differs_is_told_by_name() -> None:
    other = replace(FULL, rope="other", geometry=replace(GEOMETRY, layers=3))
    assert NAMESPACE.differing(other) == ["codec_layers", "geometry.layers", "rope"]
    assert NAMESPACE.differing(NAMESPACE) == []


def test_a_text_cannot_move_from_one_field_into_the_next() -> None:
    digests = set()
    for first, second in zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True):
        for whole in ("ab", "a\0b", "weights", second, f"{second}a"):
            for cut in range(len(whole) + 1):
                texts: Any = {**dict.fromkeys(TEXTS, "-"), first: whole[:cut], second: whole[cut:]}
                namespace = replace(NAMESPACE, **texts)
                digests.add((namespace, namespace.digest()))
    assert len({digest for _, digest in digests}) == len({namespace for namespace, _ in digests})


@given(namespaces, namespaces)
def test_digests_are_equal_exactly_when_namespaces_are(a: Namespace, b: Namespace) -> None:
    assert len(a.digest()) == 16
    assert (a.digest() == b.digest()) == (a == b)


def test_the_digest_is_the_same_in_every_release() -> None:
    # It stands in slot headers on disk: a change is a new format version.
    assert NAMESPACE.digest().hex() == "fb0b6ef89e4cde01af9bd1f7b29cc6de"


# -- numbers that are on disk or on the wire ------------------------------------------


def test_the_numbers_of_tiers_and_codecs_do_not_change() -> None:
    assert {tier.name: int(tier) for tier in Tier} == {"NONE": 0, "HOT": 1, "WARM": 2, "COLD": 3}
    assert {codec.name: int(codec) for codec in CodecId} == {
        "NONE": 0, "RAW": 1, "INT8": 2, "K8V4": 3, "INT4": 4, "FP8": 5,
    }  # fmt: skip
    assert [dtype.itemsize for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)] == [4, 2, 2]
    assert {state.value for state in SessionState} == {"running", "idle", "suspended", "closed"}


def test_pages_are_ordered_by_session_layer_and_block() -> None:
    keys = [PageKey(2, 0, 0), PageKey(1, 1, 0), PageKey(1, 0, 9), PageKey(1, 0, 2)]
    assert sorted(keys) == list(reversed(keys))
