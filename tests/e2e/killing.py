"""Engines and daemons killed at random: nothing kept is lost, no byte is wrong, nothing leaks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.e2e import victim
from tests.wirerig import INT8, MAX_TOKENS, START_SECONDS, connects, eventually, process
from tierd.client import Client
from tierd.errors import NotFound

ENGINES = 2
PAUSE_SECONDS = 0.15
FREE_SECONDS = 2.0  # the bar: a dead engine's memory is free by then


class Prey:
    """A program that is run again whenever it ends; what it says is kept."""

    def __init__(self, command: list[str], stack: ExitStack) -> None:
        full = [sys.executable, "-m", "tests.e2e.respawn", *command]
        self.parent: subprocess.Popen[bytes] = stack.enter_context(process(full))
        self.pid = 0
        self.kept: dict[str, int] = {}
        self.dropping: set[str] = set()
        self.wrong: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        eventually(lambda: self.pid > 0, START_SECONDS)

    def _read(self) -> None:
        assert self.parent.stdout is not None
        for raw in self.parent.stdout:
            match raw.decode().split():
                case ["pid", pid]:
                    self.pid = int(pid)
                case ["kept", number, blocks]:
                    self.kept[number] = int(blocks)
                case ["dropping", number]:
                    self.dropping.add(number)
                case _:
                    self.wrong.append(raw.decode())

    def hit(self, draw: random.Random, signals: list[signal.Signals]) -> None:
        """Kill it, or stop it for a moment."""
        pid, number = self.pid, draw.choice(signals)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(draw.uniform(0.0, 0.3))
            os.kill(pid, signal.SIGCONT)
        else:
            eventually(lambda: self.pid != pid, START_SECONDS)

    def end(self) -> None:
        self.parent.kill()
        self.parent.wait(10.0)
        self._reader.join(10.0)


def killing_run(seed: int, counts: Counter[str], kills: int = 100) -> None:
    """One run of `kills`. Raises AssertionError if anything is wrong."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        socket = str(folder / "run" / "tierd.sock")
        daemon = Prey(
            ["serve", "--socket", socket, "--warm", "1MiB", "--cold-dir", str(folder / "cold"),
             "--cold-cap", "64MiB"], stack)  # fmt: skip
        eventually(lambda: connects(socket), START_SECONDS)
        engines = [Prey(["victim", socket, str(seed + n)], stack) for n in range(ENGINES)]
        for _ in range(kills):
            time.sleep(draw.uniform(0.0, PAUSE_SECONDS))
            if draw.random() < 0.5:
                daemon.hit(draw, [signal.SIGKILL] * 5 + [signal.SIGTERM, signal.SIGSTOP])
            else:
                draw.choice(engines).hit(draw, [signal.SIGKILL] * 4 + [signal.SIGSTOP])
            counts["process_kills"] += 1
        for engine in engines:
            engine.end()
        eventually(lambda: connects(socket), START_SECONDS)
        _judge(socket, folder, daemon, engines)
        daemon.end()


def _judge(socket: str, folder: Path, daemon: Prey, engines: list[Prey]) -> None:
    wrong = [line for engine in engines for line in engine.wrong]
    assert not wrong, wrong
    with Client.connect(socket) as client:
        eventually(lambda: client.stats()["engines"] == 1, FREE_SECONDS)
        for engine in engines:
            for number, blocks in engine.kept.items():
                try:
                    handle = client.resume(number, INT8, MAX_TOKENS)
                except NotFound:
                    assert number in engine.dropping, f"{number} was kept, and is lost"
                    continue
                assert handle.sealed_blocks == blocks, f"{number}: {handle.sealed_blocks=}"
                victim.check(client, handle, blocks)
                handle.close(discard=True)
    with Client.connect(socket, kind="tool") as tool:
        for row in tool.sessions():  # kept, and killed before the engine could say so
            tool.close_session(row["id"])

        def empty() -> bool:
            tiers = tool.stats()["tiers"]
            return not any(tier["pages"] or tier["reserved_slots"] for tier in tiers.values())

        # What running engines left unclaimed goes when the claims end.
        eventually(empty, 30.0)
        eventually(lambda: tool.stats()["tiers"]["cold"]["slabs"] == 0, 30.0)
        assert tool.stats()["tiers"]["warm"]["used_bytes"] == 0
    _no_leaks(folder, daemon.pid)


def _no_leaks(folder: Path, pid: int) -> None:
    assert os.listdir(folder / "cold" / "slab") == []
    assert sorted(os.listdir(folder / "run")) == ["tierd.sock", "tierd.sock.rpc"]
    files = {path.name for path in (folder / "cold").rglob("*") if path.is_file()}
    assert not [name for name in files if name.endswith(".tmp") or name.startswith(".")], files
    assert len(files) <= 12, files  # journal segments, snapshots, superblock, LOCK

    def fds() -> list[str]:
        found = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found.append(os.readlink(path))
        return found

    eventually(lambda: not [fd for fd in fds() if "memfd:tierd" in fd or "/slab/" in fd], 5.0)
    assert len(fds()) < 60, fds()
