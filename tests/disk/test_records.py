"""Records: what is packed is unpacked, and what is no record is a typed error."""

import contextlib
import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.disk.ledgerrig import NAMESPACE
from tierd.disk.image import Image
from tierd.disk.records import (
    LENGTHS,
    PAGE_ROW,
    Kind,
    SessionRecord,
    SlabRecord,
    namespace_items,
    namespace_of,
    pack_records,
    session_items,
    session_of,
    session_records,
    slab_items,
    slab_of,
    unpack_records,
)
from tierd.errors import StorageError
from tierd.types import CodecId, DType, Geometry, Namespace

SESSION = SessionRecord(2**64 - 1, NAMESPACE, "parked", bytes(range(256)) * 8, 3)
SLAB = SlabRecord(7, bytes(16), 8192, 12)
# One other value for each field: a namespace that differs in it is another.
OTHER = {
    "geometry": Geometry(3, 1, 64, DType.FLOAT32, 16), "weights_digest": "x", "codec": CodecId.RAW,
    "revision": "r", "adapters": "a", "rope": "p", "rank_map": "m", "tenant_salt": "s",
    "format_version": 2, "codec_layers": "0=raw",
}  # fmt: skip
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=50)
    | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)  # fmt: skip


def test_a_namespace_of_before_there_were_exceptions_is_read() -> None:
    items = namespace_items(NAMESPACE)
    assert len(items[1]) == 8 and namespace_of(items) == NAMESPACE
    layered = dataclasses.replace(NAMESPACE, codec_layers="0=raw")
    assert namespace_items(layered)[1] == [*items[1], "0=raw"]


@pytest.mark.parametrize("text", ["0=int3", "9999=raw", "1=raw,0=raw", 7])
def test_exceptions_that_are_none_of_the_namespaces_layers_are_refused(text: object) -> None:
    shape, own = namespace_items(NAMESPACE)
    with pytest.raises(StorageError):
        namespace_of([shape, [*own, text]])


def test_a_row_is_44_packed_bytes() -> None:
    assert PAGE_ROW.itemsize == 44
    names = ("session", "block", "layer", "codec", "slab", "slot", "generation", "digest")
    assert [PAGE_ROW.fields[name][1] for name in names] == [0, 8, 12, 14, 16, 20, 24, 28]


@pytest.mark.parametrize("name", OTHER)
def test_every_field_of_a_namespace_travels(name: str) -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(Namespace)}
    other = dataclasses.replace(NAMESPACE, **{name: OTHER[name]})
    items = msgpack.unpackb(msgpack.packb(namespace_items(other)))
    assert namespace_of(items) == other != NAMESPACE
    assert namespace_of(items).digest() == other.digest()


@pytest.mark.parametrize("part_bytes", [100, 512, 2048, 4096])
def test_a_session_travels_in_parts(part_bytes: int) -> None:
    image = Image()
    payload = pack_records(session_records(SESSION, part_bytes))
    for record in unpack_records(payload):
        image.apply(record)
    assert image.sessions == {SESSION.number: SESSION}


def test_a_session_whose_parts_do_not_join_is_refused() -> None:
    records = list(unpack_records(pack_records(session_records(SESSION, 100))))
    image = Image()
    for record in records[:3]:
        image.apply(record)
    with pytest.raises(StorageError):
        image.apply(records[4])
    with pytest.raises(StorageError):
        image.apply(records[-1])


def test_parts_left_by_a_session_that_was_never_put_do_no_harm() -> None:
    records = list(unpack_records(pack_records(session_records(SESSION, 100))))
    image = Image()
    for record in [*records[:3], *records]:
        image.apply(record)
    assert image.sessions == {SESSION.number: SESSION}
    shorter = dataclasses.replace(SESSION, token_ids=b"1234", sealed_blocks=0)
    for record in [*records[:3], *session_records(shorter, 100)]:
        image.apply(record)
    assert image.sessions == {SESSION.number: shorter}


def test_slabs_and_sessions_of_a_snapshot_travel() -> None:
    for items, back in ((session_items(SESSION), session_of), (slab_items(SLAB), slab_of)):
        assert back(msgpack.unpackb(msgpack.packb(items))) in (SESSION, SLAB)


@given(st.binary(max_size=60))
def test_any_bytes_are_records_or_a_typed_error(data: bytes) -> None:
    _apply(data)


@pytest.mark.parametrize("kind", list(Kind))
@given(data=st.data())
def test_any_record_is_applied_or_a_typed_error(kind: Kind, data: st.DataObject) -> None:
    number = st.integers(0, 3) | st.integers(0, 2**64 - 1)
    record = [int(kind), data.draw(number if kind != Kind.COMMIT else JUNK)]
    items = data.draw(
        st.lists(JUNK | number, min_size=LENGTHS[kind] - 2, max_size=LENGTHS[kind] - 2)
    )
    _apply(msgpack.packb([[*record, *items]]))


@given(JUNK)
def test_any_items_are_a_session_a_slab_a_namespace_or_a_typed_error(items: object) -> None:
    for back in (session_of, slab_of, namespace_of):
        with contextlib.suppress(StorageError):
            back(items)


def _apply(data: bytes) -> None:
    image = Image()
    with contextlib.suppress(StorageError):
        for record in unpack_records(data):
            image.apply(record)
    image.all_rows()


@pytest.mark.parametrize("depth", [10, 5000])
def test_deep_nesting_is_a_typed_error(depth: int) -> None:
    with pytest.raises(StorageError):
        list(unpack_records(b"\x91" * depth))
