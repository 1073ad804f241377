"""A runner and a daemon that are not there: what the command line says is tested alone."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tierd.cli import main
from tierd.errors import TierdError

REPORT: dict[str, Any] = {
    "version": 1,
    "text": "It asserts.\n",
    "model": "m",
    "dtype": "float32",
    "codec": "int8",
    "plan": "near",
    "block_tokens": 256,
    "kv_bytes": 4096,
    "prefill": {"tokens": 300, "seconds": 1.0, "tokens_per_second": 300.0},
    "decode": {"tokens": 4, "steps": 3, "seconds": 0.5, "tokens_per_second": 6.0,
               "rpc_per_step": 0.0},
    "session": {"id": "00000000000000ab", "kept": False},
    "hot": {"pages": 30, "bytes": 1024, "share": 0.25, "pages_read_per_token": 30.0,
            "peak_bytes": 1000, "budget_bytes": 1024, "demotions": 90},
    "warm": {"pages": 30, "bytes": 1024, "share": 0.25, "pages_read_per_token": 30.0, "spills": 60},
    "cold": {"pages": 60, "bytes": 2048, "share": 0.5, "pages_read_per_token": 60.0,
             "promotions": 0, "device": "O_DIRECT"},
    "checks": {"digests_verified": 180, "integrity": True},
}  # fmt: skip


@dataclass
class FakeWorld:
    """What the fakes saw, and what they are to do."""

    specs: list[Any] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    daemons_open: int = 0
    report: dict[str, Any] = field(default_factory=lambda: dict(REPORT))
    during_job: Callable[[Any], None] = lambda events: None
    cold_needed_bytes: int = 8192
    cold_unguarded_bytes: int = 8192
    client_stats: dict[str, Any] = field(default_factory=dict)
    client_sessions: list[dict[str, Any]] = field(default_factory=list)
    hints: list[Any] = field(default_factory=list)
    ticket: dict[str, Any] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    model_error: Exception | None = None
    hot_bytes: int = 1024
    device: str = "cpu"
    connect_error: Exception | None = None


class _Spec(SimpleNamespace):
    keep = drop = False
    resume = context_tokens = None

    @property
    def keeps(self) -> bool:
        return not self.drop and (self.keep or self.resume is not None)


def _jobcheck(world: FakeWorld) -> ModuleType:
    def check_request(model: str, request: Any) -> None:
        world.models.append(model)
        world.requests.append(request)
        if world.model_error is not None:
            raise world.model_error

    module = ModuleType("tierd_engine.jobcheck")
    module.check_request = check_request  # type: ignore[attr-defined]
    module.Request = SimpleNamespace  # type: ignore[attr-defined]
    return module


class NotKept(TierdError):
    """As the runner's."""

    def __init__(self, report: dict[str, Any], message: str, exit_code: int) -> None:
        super().__init__(message)
        self.report = SimpleNamespace(to_dict=lambda: report)
        self.exit_code = exit_code


def _runner(world: FakeWorld) -> ModuleType:
    def prepare_job(spec: Any, socket: str | None = None) -> Any:
        world.specs.append(spec)
        sizes = SimpleNamespace(
            hot_budget_bytes=1024, hot_bytes=world.hot_bytes, warm_budget_bytes=4096,
            cold_needed_bytes=world.cold_needed_bytes,
            cold_unguarded_bytes=world.cold_unguarded_bytes, context_tokens=300,
        )  # fmt: skip
        return SimpleNamespace(spec=spec, sizes=sizes, device=world.device)

    def run_job(job: Any, *, socket: str, events: Any) -> Any:
        world.sockets.append(socket)
        events.prefill_started(300)
        events.prefill_advanced(300)
        for part in ("It ", "", "asserts.\n"):
            events.token(part)
        events.note("a note")
        world.during_job(events)
        return SimpleNamespace(to_dict=lambda: world.report)

    module = ModuleType("tierd_engine.runner")
    module.JobSpec = _Spec  # type: ignore[attr-defined]
    module.prepare_job = prepare_job  # type: ignore[attr-defined]
    module.run_job = run_job  # type: ignore[attr-defined]
    return module


def _report() -> ModuleType:
    module = ModuleType("tierd_engine.report")
    module.NotKept = NotKept  # type: ignore[attr-defined]
    return module


def _daemon(world: FakeWorld) -> ModuleType:
    class EmbeddedDaemon:
        socket = "/fake/embedded.sock"

        def __init__(self, config: Any) -> None:
            world.configs.append(config)

        def __enter__(self) -> "EmbeddedDaemon":
            world.daemons_open += 1
            return self

        def __exit__(self, *_: object) -> None:
            world.daemons_open -= 1

    module = ModuleType("tierd.daemon")
    module.EmbeddedDaemon = EmbeddedDaemon  # type: ignore[attr-defined]
    return module


def _client(world: FakeWorld) -> ModuleType:
    class Client:
        @classmethod
        def connect(cls, socket: str, *, kind: str = "engine") -> "Client":
            assert kind == "tool"
            world.sockets.append(socket)
            if world.connect_error is not None:
                raise world.connect_error
            return cls()

        def stats(self) -> dict[str, Any]:
            return world.client_stats

        def sessions(self) -> list[dict[str, Any]]:
            return world.client_sessions

        def session(self, session: str) -> dict[str, Any]:
            (found,) = [row for row in world.client_sessions if row["id"] == session]
            return found

        def close_session(self, session: str) -> None:
            world.closed.append(session)

        def hint(self, session: str, **wish: Any) -> dict[str, Any]:
            world.hints.append((session, wish))
            ticket = {"hint_id": 7, "pages": 30, "moving": 30, "estimated_seconds": 0.25}
            return {**ticket, **world.ticket}

        def close(self) -> None:
            pass

    module = ModuleType("tierd.client")
    module.Client = Client  # type: ignore[attr-defined]
    return module


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorld]:
    """Put fakes in the place of runner, daemon and client."""
    fake = FakeWorld()
    monkeypatch.setitem(sys.modules, "tierd_engine.runner", _runner(fake))
    monkeypatch.setitem(sys.modules, "tierd_engine.report", _report())
    monkeypatch.setitem(sys.modules, "tierd_engine.jobcheck", _jobcheck(fake))
    monkeypatch.setitem(sys.modules, "tierd.daemon", _daemon(fake))
    monkeypatch.setitem(sys.modules, "tierd.client", _client(fake))
    yield fake
    assert fake.daemons_open == 0


@dataclass
class Outcome:
    """What one run of the command left."""

    code: int
    out: str
    err: str


@pytest.fixture
def tierd(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs the command in this process."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
