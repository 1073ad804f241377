"""What a codec costs a layer, against float64, a token and a query at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierd.codec.layout import page_layout
from tierd.codec.reference import decode_page, encode_page
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.outputerror import QUERIES_MAX, SINK_TOKENS, Heard, OutputProbe, Scene

LAYERS, HEADS, TOKENS, WIDTH = 3, 4, 32, 32
RUN_IN = 2


@pytest.fixture
def arena() -> HotArena:
    geometry = Geometry(LAYERS, 2, WIDTH, DType.FLOAT32, TOKENS)
    arena = HotArena(geometry, 4 * hot_block_bytes(geometry), blocks_max=4)
    torch.manual_seed(0)
    arena.keys.normal_()
    arena.values.normal_()
    return arena


def probe_of(arena: HotArena, position: int, n: int = 5) -> OutputProbe:
    slots = {block: arena.allocate() for block in range(4)}
    scene = Scene.set_up(arena, slots, [2, 1], position)
    heard = Heard(
        torch.randn(LAYERS, HEADS, n, WIDTH),
        torch.randn(LAYERS, 2, n, WIDTH),
        torch.randn(LAYERS, 2, n, WIDTH),
        torch.randn(LAYERS, n, HEADS, WIDTH),
        WIDTH**-0.5,
        RUN_IN,
    )
    return OutputProbe(scene, heard)


def reference(probe: OutputProbe, layer: int, codec: CodecId) -> tuple[float, float]:
    """Return (mean KL, relative error) in float64."""
    scene, heard = probe._scene, probe._heard
    arena, layout = scene.arena, page_layout(scene.arena.geometry, codec)
    exact, coded = {}, {}
    for block in scene.slots:
        slot = scene.slots[block]
        exact[block] = arena.keys[slot, layer].numpy(), arena.values[slot, layer].numpy()
        if block in scene.measured:
            start = arena.page_address(slot, layer) - arena.base_address
            hot = arena._storage[start : start + arena.layout.payload_bytes].numpy()
            coded[block] = decode_page(encode_page(hot, layout)[0], layout)
    changes, plain, n = [], [], heard.q.shape[2]
    for i in range(RUN_IN, n):
        for head in range(HEADS):
            q = heard.q[layer, head, i].double().numpy() * heard.scale
            sides = []
            for held in (exact, {**exact, **coded}):
                pairs = []
                for block, first, last in scene.spans:
                    for at in range(first, last):
                        far = block * TOKENS + at <= scene.at + i - scene.recent_tokens
                        k, v = (held if far else exact)[block]
                        pairs.append((k[head // 2, at], v[head // 2, at]))
                for own in range(i + 1):
                    pairs.append((
                        heard.keys[layer, head // 2, own].numpy(),
                        heard.values[layer, head // 2, own].numpy(),
                    ))  # fmt: skip
                scores = np.array([float(q @ k.astype(np.float64)) for k, _ in pairs])
                weights = np.exp(scores - scores.max())
                values = np.array([v for _, v in pairs], np.float64)
                sides.append(weights @ values / weights.sum())
            plain.append(sides[0])
            changes.append(sides[1] - sides[0])
    moved = np.array(changes).reshape(n - RUN_IN, HEADS, WIDTH)
    g = heard.gradients[layer, RUN_IN:].double().numpy()
    kl = float(np.square((g * moved).sum((1, 2))).mean()) / 2
    return kl, float(np.sqrt(np.square(changes).sum() / np.square(plain).sum()))


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.INT4])
@pytest.mark.parametrize("position", [97, 120, 126])
def test_the_cost_is_that_of_attention_with_and_without(
    arena: HotArena, codec: CodecId, position: int
) -> None:
    probe = probe_of(arena, position)
    cost = probe.cost(codec)
    for layer in range(LAYERS):
        kl, error = reference(probe, layer, codec)
        assert cost.error[layer] == pytest.approx(error, rel=1e-3)
        assert cost.kl[layer] == pytest.approx(kl, rel=5e-3)


def test_raw_pages_cost_nothing(arena: HotArena) -> None:
    cost = probe_of(arena, 120).cost(CodecId.RAW)
    assert cost.kl.max() < 1e-10 and cost.error.max() < 1e-5


def test_passes_over_fewer_layers_give_the_same(arena: HotArena) -> None:
    probe = probe_of(arena, 119)
    whole = probe.cost(CodecId.K8V4)
    probe._layers_per_pass = 2
    again = probe.cost(CodecId.K8V4)
    np.testing.assert_allclose(again.kl, whole.kl, rtol=1e-6)
    np.testing.assert_allclose(again.error, whole.error, rtol=1e-6)


def test_a_layer_with_a_page_that_cannot_be_encoded_is_not_measured(arena: HotArena) -> None:
    probe = probe_of(arena, 119)
    arena.keys[probe._scene.slots[2], 1, 0, 3, 0] = torch.inf
    cost = probe.cost(CodecId.INT8)
    assert np.isnan(cost.kl).tolist() == np.isnan(cost.error).tolist() == [False, True, False]


def test_a_scene_is_the_sinks_the_measured_blocks_and_what_the_queries_have_just_read(
    arena: HotArena,
) -> None:
    slots = {block: arena.allocate() for block in range(4)}
    for position in (96, 100, 128):
        scene = Scene.set_up(arena, slots, [1, 2], position)
        held = {b: range(b * TOKENS + i, b * TOKENS + j) for b, i, j in scene.spans}
        assert scene.measured == [1, 2] and scene.coded_tokens == 64
        # The queries stand for the newest tokens, but not before a measured one.
        assert scene.at == 96
        assert (held[0], held[1], held[2]) == (range(SINK_TOKENS), range(32, 64), range(64, 96))
        assert 3 not in held
    assert Scene.set_up(arena, slots, [1], 128).at == 128 - QUERIES_MAX
