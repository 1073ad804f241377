"""Names of codecs, and what the batch calls refuse."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tierd.codec import codec_for, decode_pages, encode_pages, page_layout, parse_codec
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry

LAYOUT = page_layout(Geometry(1, 2, 8, DType.FLOAT32, 16), CodecId.INT8)
NONE = np.empty(0, dtype=np.int64)


def test_codecs_are_named_as_users_write_them() -> None:
    assert parse_codec("raw") is CodecId.RAW
    assert parse_codec(" INT8 ") is CodecId.INT8


@pytest.mark.parametrize("text", ["", "none", "q8", "int2"])
def test_an_unknown_name_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"choose one of raw, int8, k8v4, int4, fp8"):
        parse_codec(text)


def test_a_codec_that_is_not_built_in_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="NONE"):
        codec_for(CodecId.NONE)


def test_importing_the_codecs_loads_no_compiler() -> None:
    code = "import sys, tierd.codec; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_encoding_refuses_batches_of_different_lengths() -> None:
    with pytest.raises(InvalidArgument, match="1 source pages, 0 destinations"):
        encode_pages(np.zeros(1, np.int64), NONE, LAYOUT)


def test_addresses_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="int64"):
        encode_pages(np.zeros(1, np.int32), np.zeros(1, np.int32), LAYOUT)


@pytest.mark.parametrize(
    ("keys", "values", "start", "message"),
    [
        (np.zeros((2, 16, 9), np.float32), np.zeros((2, 16, 8), np.float32), 0, "keys of shape"),
        (np.zeros((2, 16, 8), np.float32), np.zeros((2, 15, 8), np.float32), 0, "values of shape"),
        (np.zeros((2, 16, 8), np.float32), np.zeros((2, 16, 8), np.float32), 1, "from 1 on"),
        (np.zeros((2, 16, 8), np.float32), np.zeros((2, 16, 8), np.float32), -1, "from -1 on"),
        (np.zeros((2, 16, 8), np.uint16), np.zeros((2, 16, 8), np.uint16), 0, "uint16"),
        (np.zeros((2, 16, 8), np.float32), np.zeros((2, 16, 8), np.uint16), 0, "dtype"),
        (np.zeros((2, 8, 16), np.float32).swapaxes(1, 2),) * 2 + (0, "contiguous"),
    ],
)
def test_decoding_refuses_arrays_that_do_not_fit(
    keys: np.ndarray, values: np.ndarray, start: int, message: str
) -> None:
    page = np.zeros(LAYOUT.payload_bytes, np.uint8)
    with pytest.raises(InvalidArgument, match=message):
        decode_pages(np.array([page.ctypes.data]), LAYOUT, keys, values, start)
