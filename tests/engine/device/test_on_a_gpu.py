"""On a CUDA device, where there is one: order, pinning, and a session's own greedy tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.support import TierRig, greedy, own_greedy, random_tokens, tiny_model
from tierd.codec import digest_pages
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import page_layout
from tierd.errors import DeviceFailed, DeviceUnavailable
from tierd.memory.memfd import Mapping, create_memfd
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.coldpath import PathKind
from tierd_engine.device.encoder import DeviceEncoder
from tierd_engine.device.opening import DeviceName, DeviceRig, open_rig
from tierd_engine.device.port import Rows
from tierd_engine.device.probing import PROBE_SECONDS, probe_folder
from tierd_engine.fidelity import kl_divergence

MIB = 1 << 20


@pytest.fixture(scope="module")
def rig() -> Iterator[DeviceRig]:
    """Yield the CUDA device, or skip."""
    try:
        rig = open_rig(DeviceName.CUDA)
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    assert rig is not None
    yield rig
    rig.close()


def test_a_memfd_is_pinned_and_its_rows_come_in_whole(rig: DeviceRig) -> None:
    device = rig.device
    size = 8 * MIB
    with Mapping(create_memfd("tierd-test", size), size, writable=True) as mapped:
        source = np.frombuffer(mapped.buffer, np.uint8)
        source[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        device.register(mapped.address, size)
        target = device.allocate(4 * MIB)
        stream, ended = device.new_stream("in"), device.new_event("ended")
        rows = Rows(mapped.address, 2 * MIB, target.address, MIB, MIB, 4)
        device.copy_in_rows(stream, rows)
        device.record(ended, stream, "record")
        device.wait_host(ended, 10.0, "wait")
        expected = source.reshape(4, 2 * MIB)[:, :MIB].reshape(-1)
        assert np.array_equal(target.tensor.cpu().numpy(), expected)
        device.unregister(mapped.address)
        device.free(target)
        del source


def test_streams_run_in_the_order_of_events(rig: DeviceRig) -> None:
    device = rig.device
    stream, ready = device.new_stream("side"), device.new_event("ready")
    buffer = device.allocate(64 * MIB)
    for value in range(20):
        device.launch(device.compute, lambda value=value: _fill(buffer.tensor, value))  # type: ignore[misc]
        device.record(ready, device.compute, "record")
        device.wait(stream, ready, "wait")
        seen: list[torch.Tensor] = []
        device.launch(stream, lambda seen=seen: seen.append(buffer.tensor[-1:].clone()))  # type: ignore[misc]
        device.record(ready, stream, "record")
        device.wait(device.compute, ready, "wait")
        device.wait_host(ready, 10.0, "wait")
        assert int(seen[0]) == value
    device.free(buffer)


def _fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def test_a_wait_has_its_limit(rig: DeviceRig) -> None:
    device = rig.device
    late = device.new_event("late")
    device.launch(device.compute, lambda: torch.cuda._sleep(2_000_000_000))  # a second or so
    device.record(late, device.compute, "record")
    with pytest.raises(DeviceFailed, match="wait: late is not reached"):
        device.wait_host(late, 0.01, "wait")
    device.wait_host(late, 30.0, "wait")


@pytest.mark.parametrize("mode", list(PlanMode))
def test_raw_gives_the_own_caches_tokens(rig: DeviceRig, mode: PlanMode) -> None:
    tiny = tiny_model(5, "llama")
    tiny.model.to(rig.device.torch_device)
    prompt = random_tokens(300, 18)
    tiers = TierRig(
        tiny.shape, tiny.model, 300, 32, hot="20%", warm="30%", plan=mode, block_tokens=64, rig=rig
    )
    with tiers:
        run = greedy(tiers.generator, prompt, 32)
        assert run.tokens == own_greedy(tiny.model, prompt, 32)[0]
        tiers.kv.check_integrity()
    tiny.model.to("cpu")


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.FP8])
def test_encoded_pages_are_as_good_as_on_the_host(rig: DeviceRig, codec: CodecId) -> None:
    tiny = tiny_model(5, "llama")
    tiny.model.to(rig.device.torch_device, torch.bfloat16)
    prompt = random_tokens(300, 18)
    tiers = TierRig(
        tiny.shape, tiny.model, 300, 16, hot="20%", warm="100%", codec=codec, block_tokens=64,
        dtype=DType.BFLOAT16, rig=rig,
    )  # fmt: skip
    with tiers:
        run = greedy(tiers.generator, prompt, 16)
        own = own_greedy(tiny.model, prompt, 16)[1]
        assert kl_divergence(own[0], run.logits[0]) < 5e-3
    tiny.model.to("cpu")


def test_the_path_of_cold_pages_is_probed_and_never_hangs(rig: DeviceRig, tmp_path: Path) -> None:
    assert rig.paths is not None
    began = time.monotonic()
    found = probe_folder(rig.paths, tmp_path)
    assert time.monotonic() - began < 4 * PROBE_SECONDS
    assert found.reason or found.kind is PathKind.GDS
    assert "not the file's" not in found.reason, "kvikio's bytes were wrong"
    if found.kind is PathKind.GDS:
        assert found.writes is PathKind.GDS or found.writes_reason
        assert "does not hold the bytes" not in found.writes_reason, "kvikio's bytes were wrong"


def test_pages_that_find_warm_full_take_the_path_that_their_disk_has(rig: DeviceRig) -> None:
    tiny = tiny_model(5, "llama")
    tiny.model.to(rig.device.torch_device)
    prompt = random_tokens(600, 18)
    tiers = TierRig(
        tiny.shape, tiny.model, 600, 80, hot="20%", warm="10%", plan=PlanMode.STREAM,
        block_tokens=64, rig=rig,
    )  # fmt: skip
    with tiers:
        run = greedy(tiers.generator, prompt, 80)
        assert run.tokens == own_greedy(tiny.model, prompt, 80)[0]
        written = tiers.kv.workings.cold_writer.figures()
        direct, disks = written["direct"], rig.paths.figures() if rig.paths else []
        print(written, disks)
        assert tiers.client.stats()["corrupt"] == 0 and direct["mismatches"] == 0
        if any(disk["writes"] == "gds" for disk in disks):
            assert direct["pages"] > 0 and direct["errors"] == direct["deadlines"] == 0
        tiers.kv.check_integrity()
    tiny.model.to("cpu")


def test_xxh3_and_placed_pages_are_the_cpus(rig: DeviceRig) -> None:
    geometry = Geometry(2, 4, 64, DType.BFLOAT16, 64)
    device = rig.device
    arena = DeviceArena(device, geometry, 2 * hot_block_bytes(geometry), blocks_max=2)
    encoder = DeviceEncoder(device, rig.kernels, arena, device.new_event("none"), digests=True)
    rng = np.random.default_rng()
    keys = rng.standard_normal((2, 2, 4, 64, 64)).astype(np.float32)
    for block in range(2):
        slot = arena.allocate()
        for layer in range(2):
            there = torch.from_numpy(keys[block, layer]).to(device.torch_device, torch.bfloat16)
            arena.write(slot, layer, 0, there, -there)
    source = np.array([arena.page_address(b, n) for b in range(2) for n in range(2)], np.int64)
    for codec in (CodecId.RAW, CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8):
        layout = page_layout(geometry, codec)
        buffer = device.allocate(4 * layout.slot_bytes)
        starts = buffer.address + 64 + np.arange(4, dtype=np.int64) * layout.slot_bytes
        placed = encoder.place(source, starts, layout)
        memory = buffer.tensor.cpu().numpy()
        payloads = memory.ctypes.data + starts - buffer.address
        assert not placed.status.any()
        assert np.array_equal(placed.digests, digest_pages(payloads, layout.payload_bytes))
        assert placed.device_digests is not None
        expected = device_digests(payloads, layout.payload_bytes)
        assert np.array_equal(placed.device_digests, expected)
        device.free(buffer)
    encoder.close()
    arena.close()


def test_the_links_rate_is_measured(rig: DeviceRig) -> None:
    assert rig.rates.link > 1e9
