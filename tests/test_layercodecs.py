"""Codecs per layer: what is written, its one canonical text, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import InvalidArgument
from tierd.layercodecs import (
    CodecChoice,
    better_codecs,
    describe_codecs,
    format_layers,
    layer_codecs,
    parse_codec_choice,
)
from tierd.types import CodecId, DType, Geometry, Namespace

CODECS = [codec for codec in CodecId if codec is not CodecId.NONE]
SPACE = Namespace(Geometry(4, 1, 64, DType.FLOAT32, 16), "w", CodecId.K8V4)


@pytest.mark.parametrize(
    ("text", "base", "layers"),
    [
        ("int8", CodecId.INT8, ""),
        ("k8v4,layers:0-1=int8", CodecId.K8V4, "0-1=int8"),
        (" K8V4 , layers:3=RAW , layers:0-1=int8 ", CodecId.K8V4, "0-1=int8,3=raw"),
        ("k8v4,layers:1=int8,layers:0=int8,layers:2=raw", CodecId.K8V4, "0-1=int8,2=raw"),
        ("int4,layers:0-3=int4,layers:4=raw", CodecId.INT4, "4=raw"),
        ("raw,layers:7-7=int8", CodecId.RAW, "7=int8"),
    ],
)
def test_a_choice_has_one_canonical_text(text: str, base: CodecId, layers: str) -> None:
    choice = parse_codec_choice(text)
    assert choice == CodecChoice(base, layers)
    assert parse_codec_choice(str(choice)) == choice


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("int3", "'int3' is not a codec"),
        ("layers:0=int8", r"begins with layers; write k8v4,layers:0=int8"),
        ("k8v4,int8", "'int8' is not understood; write layers:0-1=int8"),
        ("k8v4,layers:0-1", "'0-1' is not understood; write 0-1=int8"),
        ("k8v4,layers:-1=int8", "is not understood"),
        ("k8v4,layers:3-1=int8", "layers 3 to 1 are no range"),
        ("k8v4,layers:0=int9", "'int9' is not a codec"),
        ("k8v4,layers:0-2=int8,layers:2=raw", "names layer 2 twice"),
        ("k8v4,layers:0=none", "'none' is not a codec"),
        ("", "'' is not a codec"),
    ],
)
def test_what_is_no_choice_is_refused_with_what_to_write(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        parse_codec_choice(text)


@given(st.sampled_from(CODECS), st.lists(st.sampled_from(CODECS), min_size=1, max_size=9))
def test_a_codec_a_layer_comes_back_from_its_text(base: CodecId, codecs: list[CodecId]) -> None:
    text = format_layers(base, dict(enumerate(codecs)))
    assert CodecChoice(base, text).per_layer(len(codecs)) == tuple(codecs)
    assert parse_codec_choice(describe_codecs(base, codecs)).layers == text


def test_a_namespace_says_each_layers_codec() -> None:
    space = replace(SPACE, codec_layers="0-1=int8,3=raw")
    assert layer_codecs(space) == (CodecId.INT8, CodecId.INT8, CodecId.K8V4, CodecId.RAW)
    assert layer_codecs(SPACE) == (CodecId.K8V4,) * 4


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("4=int8", r"k8v4,layers:4=int8 names layer 4; the model has layers 0 to 3"),
        ("0=int8,1=int8", "canonical"),
        ("0=k8v4", "canonical"),
        ("1=int8,0=raw", "canonical"),
        ("00=int8", "canonical"),
        ("x", "not understood"),
    ],
)
def test_a_namespace_with_another_text_is_refused(layers: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        layer_codecs(replace(SPACE, codec_layers=layers))


def test_better_codecs_end_in_raw_and_never_come_back() -> None:
    assert better_codecs(CodecId.INT4) == (CodecId.K8V4, CodecId.INT8, CodecId.RAW)
    for codec in CODECS:
        ladder = (codec, *better_codecs(codec))
        assert ladder[-1] is CodecId.RAW and len(set(ladder)) == len(ladder)
        assert all(better_codecs(b) == ladder[i + 1 :] for i, b in enumerate(ladder) if i)
