"""Messages and records: what goes in comes out; what is not understood is refused by name."""

import numpy as np
import pytest

from tierd.errors import InvalidArgument
from tierd.rpc import wire
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.types import CodecId, DType, Geometry, Namespace, Place, Tier

GEOMETRY = Geometry(2, 3, 20, DType.BFLOAT16, 64)
NAMESPACE = Namespace(
    GEOMETRY, "weights", CodecId.RAW, "main", "adapters", "rope", "ranks", "salt", 7, "1=int8"
)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("codec", [codec for codec in CodecId if codec is not CodecId.NONE])
def test_a_namespace_keeps_its_digest(dtype: DType, codec: CodecId) -> None:
    namespace = Namespace(Geometry(2, 3, 20, dtype, 64), "weights", codec)
    sent = wire.namespace_to_wire(namespace).SerializeToString()
    arrived = wire.namespace_from_wire(pb.Namespace.FromString(sent))
    assert arrived == namespace and arrived.digest() == namespace.digest()


def test_every_field_of_a_namespace_travels() -> None:
    assert wire.namespace_from_wire(wire.namespace_to_wire(NAMESPACE)) == NAMESPACE


def test_every_codec_has_the_same_number_on_the_wire() -> None:
    for codec in CodecId:
        if codec is not CodecId.NONE:
            assert int(wire.codec_to_wire(codec)) == int(codec)
            assert wire.codec_of(int(codec)) is codec
    assert wire.codec_of(0) is None


@pytest.mark.parametrize("field", ["codec", "dtype", "layers", "block_tokens"])
def test_a_namespace_that_is_not_understood_is_refused_by_name(field: str) -> None:
    message = wire.namespace_to_wire(NAMESPACE)
    setattr(
        message if field == "codec" else message.geometry, field, 99 if field != "layers" else 0
    )
    with pytest.raises(InvalidArgument, match=field):
        wire.namespace_from_wire(message)


def test_a_namespace_without_codec_is_refused() -> None:
    message = wire.namespace_to_wire(NAMESPACE)
    message.codec = pb.CODEC_UNSPECIFIED
    with pytest.raises(InvalidArgument, match="codec"):
        wire.namespace_from_wire(message)


def test_exceptions_that_are_not_canonical_are_refused() -> None:
    message = wire.namespace_to_wire(NAMESPACE)
    message.codec_layers = "2=int8"
    with pytest.raises(InvalidArgument, match="layers 0 to 1"):
        wire.namespace_from_wire(message)


def test_codecs_a_layer_travel_as_bytes() -> None:
    codecs = [CodecId.INT8, CodecId.RAW]
    assert wire.codecs_of(wire.codecs_to_wire(codecs)) == codecs
    assert wire.codecs_of(wire.codecs_to_wire(None)) is None
    for wrong in (bytes([2, 0]), bytes([99])):
        with pytest.raises(InvalidArgument, match="codec"):
            wire.codecs_of(wrong)


def test_a_plan_travels_by_columns() -> None:
    places = [
        [Place(Tier.WARM, codec, 1 + block, 10 * block + layer, 2**32 - 1) for layer in range(3)]
        for block, codec in enumerate([CodecId.RAW, CodecId.INT8])
    ]
    reply = wire.plan_to_wire(9, [0, 5], places)
    assert list(reply.blocks) == [0, 5] and reply.codecs == bytes([1, 1, 1, 2, 2, 2])
    assert wire.codec_column(reply.codecs, 2).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert wire.u32_column(reply.slabs, 2).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert wire.u32_column(reply.slots, 2).tolist() == [[0, 1, 2], [10, 11, 12]]
    assert (wire.u32_column(reply.generations, 2) == 2**32 - 1).all()


def test_token_ids_travel_little_endian() -> None:
    ids = np.array([1, 256, 2**32 - 1], dtype=np.uint32)
    data = wire.token_ids_to_wire(ids)
    assert data == bytes([1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 255, 255])
    assert (wire.token_ids_from_wire(data) == ids).all()


@pytest.mark.parametrize(
    "text", ["", "zz", "0" * 15, "0" * 17, "x" * 16, "+" + "0" * 15, "0x" + "0" * 14, "0_" * 8]
)
def test_a_wrong_session_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="session id"):
        wire.session_number(text)


def test_a_session_id_is_its_number() -> None:
    assert wire.session_number(wire.session_id(2**64 - 1)) == 2**64 - 1


@pytest.mark.parametrize("ids", [[-1], [2**32], [0.5]])
def test_token_ids_that_do_not_fit_are_refused(ids: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="token ids"):
        wire.token_ids_to_wire(np.array(ids))


def test_a_namespaces_texts_have_a_limit() -> None:
    message = wire.namespace_to_wire(NAMESPACE)
    message.adapters = "x" * (wire.TEXT_BYTES_MAX + 1)
    with pytest.raises(InvalidArgument, match="adapters"):
        wire.namespace_from_wire(message)


def test_what_does_not_fit_a_field_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="OpenRequest"):
        wire.request(pb.OpenRequest, max_tokens=-1)
