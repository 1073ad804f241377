"""The daemon as a whole: in this process and in its own, its clients dying, itself dying."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.wirerig import (
    BLOCK_BYTES,
    INT8,
    LAYERS,
    MAX_TOKENS,
    codec_at,
    daemon_process,
    demote,
    engine_process,
    eventually,
    page_bytes,
    process,
    read_page,
    small_config,
    store_session,
)
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon, rpc_target
from tierd.errors import (
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    NotFound,
    StorageError,
    TierFull,
)
from tierd.rpc.errors import CLIENT_KEY, TOKEN_KEY
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc
from tierd.types import CodecId, Tier

FREED_SECONDS = 2.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[EmbeddedDaemon]:
    with EmbeddedDaemon(small_config(tmp_path)) as running:
        yield running


# -- in this process ------------------------------------------------------------------


def test_embedded_daemons_leave_nothing_behind(tmp_path: Path) -> None:
    run_once(tmp_path)  # gRPC makes a few threads and fds of its own, once
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    mapped = ours_mapped()  # other tests of this process may hold some
    for _ in range(3):
        run_once(tmp_path)
    eventually(lambda: threading.active_count() <= threads)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)
    assert ours_mapped() <= mapped
    assert os.listdir(tmp_path / "cold") in ([], ["LOCK"])


def ours_mapped() -> int:
    """Return how much of tierd's memory this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:tierd")


def run_once(folder: Path) -> None:
    with EmbeddedDaemon(small_config(folder)) as daemon, Client.connect(daemon.socket) as client:
        store_session(client, 4)


def test_slab_files_that_the_ledger_does_not_know_are_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, **{"cold.ephemeral": False})
    with EmbeddedDaemon(config):
        (tmp_path / "cold/slab/0000002a").write_bytes(bytes(4096))
    with EmbeddedDaemon(config):
        assert os.listdir(tmp_path / "cold/slab") == []


def test_the_cold_cap_counts_every_byte_and_holds_after_a_restart(tmp_path: Path) -> None:
    cap_bytes = 8 << 20
    config = small_config(tmp_path, **{"cold.ephemeral": False, "cold.cap_bytes": cap_bytes})

    def used_bytes() -> int:
        files = [path for path in (tmp_path / "cold").rglob("*") if path.is_file()]
        return sum(path.stat().st_blocks * 512 for path in files)

    for _ in range(3):
        with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
            with pytest.raises(TierFull):
                for _ in range(100):
                    store_session(client, 8)
                    assert used_bytes() <= cap_bytes
            for row in client.sessions()[::2]:
                if row["state"] == "suspended":
                    client.close_session(row["id"])
        assert used_bytes() <= cap_bytes


def test_slab_files_without_a_superblock_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "cold/slab").mkdir(parents=True)
    (tmp_path / "cold/slab/0000002a").write_bytes(bytes(4096))
    with pytest.raises(StorageError, match="superblock"):
        EmbeddedDaemon(small_config(tmp_path, **{"cold.ephemeral": False})).__enter__()
    assert os.listdir(tmp_path / "cold/slab") == ["0000002a"]


def test_a_daemon_that_cannot_start_says_so_to_its_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warm\.budget_bytes"):
        EmbeddedDaemon(small_config(tmp_path, warm_bytes=1 << 50)).__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        EmbeddedDaemon(
            small_config(tmp_path, **{"cold.folder": str(tmp_path / "file")})
        ).__enter__()


def test_an_idle_daemon_uses_next_to_no_cpu(daemon: EmbeddedDaemon) -> None:
    with Client.connect(daemon.socket) as client:
        client.open_session(INT8, MAX_TOKENS)
        before = time.process_time()
        threading.Event().wait(1.0)
        assert time.process_time() - before < 0.1


def test_a_hung_daemon_is_a_deadline_and_then_goes_on(daemon: EmbeddedDaemon) -> None:
    with Client.connect(daemon.socket, deadline_seconds=0.3) as client:
        with daemon.paused():
            with pytest.raises(DeadlineExceeded):
                client.call(client._stats.Snapshot, pb.SnapshotRequest(), 0.2)
            with pytest.raises(DeadlineExceeded):
                client.slab(1)
        assert client.stats()["engines"] == 1
        with pytest.raises(NotFound):
            client.slab(1)


def test_health_and_reflection_answer_without_a_token(daemon: EmbeddedDaemon) -> None:
    with grpc.insecure_channel(rpc_target(daemon.socket)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "tierd.rpc.v1.Sessions"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5.0)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=5.0)
        names = {service.name for service in answer.list_services_response.service}
        assert {
            f"tierd.rpc.v1.{n}" for n in ("Sessions", "Placement", "Hints", "Stats", "Admin")
        } <= names


def test_a_call_without_the_right_token_is_refused(daemon: EmbeddedDaemon) -> None:
    with (
        Client.connect(daemon.socket) as client,
        grpc.insecure_channel(rpc_target(daemon.socket)) as channel,
    ):
        stub = pb_grpc.SessionsStub(channel)
        right = dict(client._metadata)
        for metadata in (
            [],
            [(CLIENT_KEY, right[CLIENT_KEY])],
            [(CLIENT_KEY, right[CLIENT_KEY]), (TOKEN_KEY, "0" * 64)],
            [(CLIENT_KEY, "999"), (TOKEN_KEY, right[TOKEN_KEY])],
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.List(pb.ListRequest(), metadata=metadata, timeout=5.0)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
        stub.List(pb.ListRequest(), metadata=list(right.items()), timeout=5.0)
        client.close()
        eventually(lambda: refuses(stub, list(right.items())))


def refuses(stub: pb_grpc.SessionsStub, metadata: list[tuple[str, str]]) -> bool:
    try:
        stub.List(pb.ListRequest(), metadata=metadata, timeout=5.0)
    except grpc.RpcError:
        return True
    return False


def test_a_client_that_leaves_frees_what_it_held(daemon: EmbeddedDaemon) -> None:
    with Client.connect(daemon.socket, kind="tool") as tool:
        client = Client.connect(daemon.socket)
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, [1, 2])
        handle.plan_demotion([3], 1)
        kept = store_session(client, 2)
        client.close()
        eventually(lambda: tool.stats()["engines"] == 0)
        stats = tool.stats()
        assert stats["demotions_open"] == 0
        assert [row["id"] for row in tool.sessions()] == [kept]
        assert stats["tiers"]["warm"]["pages"] == 2 * LAYERS


def test_metrics_are_served_where_they_are_asked_for(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = small_config(tmp_path, **{"service.metrics_port": port})
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        client.stats()
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            text = answer.read().decode()
        assert "tierd_engines 1.0" in text
        assert 'tierd_calls_total{code="OK",method="Stats/Snapshot"} 1.0' in text
        with pytest.raises(ConfigError, match="metrics_port"):
            EmbeddedDaemon(config).__enter__()


# -- in its own process -----------------------------------------------------------------


def test_pages_of_one_process_are_read_by_another(tmp_path: Path) -> None:
    with (
        daemon_process(tmp_path) as (_, path),
        engine_process(path, "store_session(client, 24)"),
        Client.connect(path) as client,
    ):
        (row,) = client.sessions()
        handle = client.resume(row["id"], INT8, MAX_TOKENS)
        tiers = handle.table.read(24).tier
        assert (tiers != Tier.NONE).all()
        for block in range(24):
            for layer in range(LAYERS):
                expected = page_bytes(layer, block, codec_at(block))
                assert read_page(client, handle, layer, block) == expected
        handle.suspend(handle.token_ids, 24)
        handle = client.resume(row["id"], INT8, MAX_TOKENS)
        handle.close()


def test_a_page_table_cannot_be_mapped_for_writing(daemon: EmbeddedDaemon) -> None:
    import mmap

    with Client.connect(daemon.socket) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        fd = client._bootstrap.session_fds(handle.number)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)


ENGINE_AT_WORK = """
handle = client.open_session(INT8, MAX_TOKENS)
demote(client, handle, range(1, 9))
plan = handle.plan_demotion([10, 11], 2)
client.epochs.enter(handle.table.epoch())
"""


def test_a_killed_engine_frees_everything_within_two_seconds(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (_, path), Client.connect(path, kind="tool") as tool:
        with engine_process(path, ENGINE_AT_WORK) as engine:
            stats = tool.stats()
            assert stats["engines"] == 1 and stats["demotions_open"] == 1
            assert stats["tiers"]["warm"]["used_bytes"] >= 8 * BLOCK_BYTES
            engine.send_signal(signal.SIGKILL)
            seconds = eventually(lambda: is_empty(tool), FREED_SECONDS)
        assert seconds < FREED_SECONDS


def test_a_stopped_engine_that_is_killed_frees_everything_too(tmp_path: Path) -> None:
    with (
        daemon_process(tmp_path) as (_, path),
        Client.connect(path, kind="tool") as tool,
        engine_process(path, ENGINE_AT_WORK) as engine,
    ):
        engine.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert tool.stats()["engines"] == 1, "stopped is not dead: it may go on"
        engine.send_signal(signal.SIGKILL)
        eventually(lambda: is_empty(tool), FREED_SECONDS)


def test_an_engines_child_does_not_keep_it_alive(tmp_path: Path) -> None:
    script = ENGINE_AT_WORK + (
        "import os\nif os.fork() == 0:\n    import time\n    time.sleep(5.0)\n    os._exit(0)\n"
    )
    with (
        daemon_process(tmp_path) as (_, path),
        Client.connect(path, kind="tool") as tool,
        engine_process(path, script) as engine,
    ):
        engine.send_signal(signal.SIGKILL)
        eventually(lambda: is_empty(tool), FREED_SECONDS)


def is_empty(tool: Client) -> bool:
    stats = tool.stats()
    warm = stats["tiers"]["warm"]
    held = (stats["engines"], stats["demotions_open"], warm["pages"], warm["used_bytes"])
    return held == (0, 0, 0, 0) and tool.sessions() == []


def test_a_killed_daemon_is_unavailable_at_once(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, path):
        client = Client.connect(path)
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, [1])
        daemon.kill()
        daemon.wait(timeout=5.0)
        started = time.monotonic()
        with pytest.raises(DaemonUnavailable, match=re.escape(path)):
            handle.plan_demotion([2], 1)
        with pytest.raises(DaemonUnavailable):
            client.slab(999)
        with pytest.raises(DaemonUnavailable):
            client.stats()
        assert time.monotonic() - started < 2.0
        # What is mapped stays readable: the engine goes on with what it has.
        assert read_page(client, handle, 0, 1) == page_bytes(0, 1, CodecId.INT8)
        handle.close()
        client.close()


def test_a_stopped_daemon_is_a_deadline(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, path):
        client = Client.connect(path)
        handle = client.open_session(INT8, MAX_TOKENS)
        daemon.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            handle.plan_demotion([2], 1, deadline_seconds=0.3)
        assert time.monotonic() - started < 1.0
        with pytest.raises(DaemonUnavailable):
            Client.connect(path, deadline_seconds=0.3)
        daemon.send_signal(signal.SIGCONT)
        assert handle.plan_demotion([2], 1).blocks == [2]
        handle.close()
        client.close()


def test_a_restarted_daemon_takes_the_place_and_old_clients_are_told(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, path):
        client = Client.connect(path)
        daemon.kill()
        daemon.wait(timeout=5.0)
        assert os.path.exists(path), "a killed daemon leaves its socket"
        with daemon_process(tmp_path) as (_, same):
            assert same == path
            eventually(lambda: "restarted" in refusal(client))
            client.close()
            with Client.connect(path) as again:
                assert again.stats()["engines"] == 1


def refusal(client: Client) -> str:
    try:
        client.stats()
    except DaemonUnavailable as error:
        return str(error)
    return ""


def test_a_second_daemon_at_one_socket_is_refused(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (_, path):
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli", "serve", "--socket", path, "--warm", "4MiB",
             "--cold-dir", str(tmp_path / "cold2"), "--cold-cap", "64MiB"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert done.returncode == 2 and "another daemon" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "cold2").exists()  # found out before its recovery
        with Client.connect(path) as client:
            assert client.stats()["engines"] == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "drain"])
def test_a_daemon_drains_and_removes_its_sockets(tmp_path: Path, how: signal.Signals | str) -> None:
    with daemon_process(tmp_path) as (daemon, path), Client.connect(path) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, [1, 2])
        if isinstance(how, str):
            client.drain()
        else:
            daemon.send_signal(how)
        assert daemon.wait(timeout=5.0) == 0
        assert os.listdir(tmp_path / "run") == []
        kept = {path.name for path in (tmp_path / "cold").rglob("*") if path.is_file()}
        assert not {name for name in kept if name.endswith(".slab") or name.startswith(".")}
        with pytest.raises(DaemonUnavailable):
            client.stats()


def test_many_engines_at_once_are_served_and_all_is_freed(tmp_path: Path) -> None:
    script = """
from tests.wirerig import *
with Client.connect({path!r}) as client:
    for turn in range(3):
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, range(1, 17))
        for block in range(1, 17):
            assert read_page(client, handle, 1, block) == page_bytes(1, block, CodecId.INT8)
        handle.close() if turn else None
"""
    with daemon_process(tmp_path) as (_, path), Client.connect(path, kind="tool") as tool:
        command = [sys.executable, "-c", script.format(path=path)]
        with process(command) as one, process(command) as two, process(command) as three:
            for engine in (one, two, three):
                assert engine.wait(timeout=30.0) == 0
        eventually(lambda: is_empty(tool), FREED_SECONDS)
        stats = tool.stats()
        assert stats["demotions"] == 3 * 3 * 16 * LAYERS and stats["corrupt"] == 0
        assert np.isfinite(stats["uptime_seconds"])


def test_a_tool_joins_the_next_daemon_by_itself_and_an_engine_is_told_how(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, path):
        tool, engine = Client.connect(path, kind="tool"), Client.connect(path)
        kept = store_session(engine, 2)
        daemon.terminate()
        daemon.wait(timeout=10.0)
        with pytest.raises(DaemonUnavailable):
            tool.sessions()
    with daemon_process(tmp_path), tool, engine:
        assert [row["id"] for row in tool.sessions()] == [kept]
        assert tool.stats()["sessions"]["suspended"] == 1
        assert tool.hint(kept, deadline_seconds=1.0)["pages"] == 2 * LAYERS
        eventually(lambda: engine.lost)
        with pytest.raises(DaemonUnavailable, match=r"by a new Client, or by Client\.rec"):
            engine.stats()
        engine.reconnect()
        assert engine.stats()["sessions"]["suspended"] == 1


def test_a_tool_joins_the_next_daemon_also_for_what_changes_something(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, path):
        tool = Client.connect(path, kind="tool")
        with Client.connect(path) as engine:
            kept = store_session(engine, 2)
        daemon.terminate()
        daemon.wait(timeout=10.0)
    with daemon_process(tmp_path), tool:
        tool.close_session(kept)
        assert tool.sessions() == []
