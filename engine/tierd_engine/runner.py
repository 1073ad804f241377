"""Long-document jobs: a model reads a document, answers a question, and a report says how.

`size_job` tells what a job needs before anything is allocated; `run_job` runs
it against a daemon's socket.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from tierd.client import Client, SessionHandle
from tierd.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    DeviceUnavailable,
    InvalidArgument,
    TierdError,
)
from tierd.layercodecs import layer_codecs, parse_codec_choice
from tierd.types import CodecId, DType, Namespace, SessionState
from tierd_engine import hf
from tierd_engine.attention.plan import PlanMode
from tierd_engine.device.opening import (
    DeviceName,
    DeviceRig,
    open_rig,
    resolve_device,
    what_is_missing,
)
from tierd_engine.fidelity import compare_with_own_cache
from tierd_engine.generator import Generator
from tierd_engine.guard import QualityGuard
from tierd_engine.jobcheck import CODEC_DEFAULT, check_length
from tierd_engine.link import AGAIN_SECONDS, REJOIN_SECONDS
from tierd_engine.prompt import TextStream, build_followup, build_prompt, follow
from tierd_engine.report import JobReport, NotDropped, NotKept, build_report, guard_of
from tierd_engine.resuming import held_dtype, resume_session
from tierd_engine.session import SessionKV
from tierd_engine.sizing import JobSizes, check_daemon_room, size_tiers
from tierd_engine.weightonly import Weights, apply_weights

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a user asks for. `hot` and `warm` are sizes ("64MiB") or shares of the KV ("25%").

    `context_tokens`: exact length of the prompt, the document cut to fit; None
    takes the whole document. `hot`, `warm` None: see sizing.py. `block_tokens` None:
    the largest of 256..16 of which the hot budget holds two. `codec` None: int8; it may
    name layers (layercodecs.py). `guard`: layers that it harms get a better one (guard.py).
    `keep`: suspend the session at the end, so that another job can `resume` it
    by its id and ask more, without the document. A resumed session has its own
    codec and block size, and is kept again unless `drop`; if the job fails or is
    interrupted, it is kept as it was. `weights`: see weightonly.py. `device`: see
    device/opening.py.
    """

    model: str
    document: str
    prompt: str
    context_tokens: int | None = None
    hot: str | None = None
    warm: str | None = None
    codec: str | None = None
    plan: str = "auto"
    max_new_tokens: int = 128
    ignore_eos: bool = False
    verify: bool = False
    dtype: str = "auto"
    block_tokens: int | None = None
    rope_scaling: str | None = None
    weights: str = "auto"
    keep: bool = False
    resume: str | None = None
    drop: bool = False
    rejoin_seconds: float = REJOIN_SECONDS
    guard: bool = True
    device: str = "auto"

    @property
    def keeps(self) -> bool:
        """Whether the session stays with the daemon when the job is done."""
        return not self.drop and (self.keep or self.resume is not None)


class JobEvents(Protocol):
    """What a job tells while it runs. Called on the job's thread."""

    def working(self, what: str) -> None:
        """A stretch of work begins that may last, and says nothing meanwhile."""

    def prefill_started(self, total_tokens: int, held_tokens: int = 0) -> None:
        """Prefill up to `total_tokens` begins; `held_tokens` of them are there already."""

    def prefill_advanced(self, done_tokens: int) -> None:
        """The session now holds `done_tokens`."""

    def token(self, text: str) -> None:
        """More text of the answer, whole characters; may be empty."""

    def note(self, text: str) -> None:
        """One line worth telling the user."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job whose model is found and whose prompt is tokenised.

    `prompt_ids`: what is fed first. `shared`: the daemon is not the job's own.
    """

    spec: JobSpec
    folder: Path
    config: Any
    shape: hf.ModelShape
    tokenizer: Any
    prompt_ids: list[int]
    namespace: Namespace
    plan: PlanMode
    sizes: JobSizes
    shared: bool
    device: DeviceName

    @property
    def dtype(self) -> DType:
        """The dtype the model computes in."""
        return self.namespace.geometry.dtype

    @property
    def codec(self) -> CodecId:
        """How pages are stored below hot."""
        return self.namespace.codec


@dataclass(slots=True)
class Timings:
    """Wall-clock of a job's two phases. A decode step makes one token."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0


def prepare_job(spec: JobSpec, socket: str | None = None) -> PreparedJob:
    """Find the model, tokenise the prompt and size the tiers. Loads no weights.

    `socket`: of a running daemon, which must have room for the job and keeps the
    session to resume. Raises BudgetTooSmall, InvalidArgument, NotFound, DeviceUnavailable.
    """
    plan = PlanMode.parse(spec.plan)
    weights = Weights.parse(spec.weights)
    device = resolve_device(DeviceName.parse(spec.device))
    # On CUDA nothing serves int8 weights faster than bfloat16 ones. torch 2.13's own product of
    # them (aten::_weight_int8pack_mm) has a thread for each output that reads its row byte by
    # byte, uncoalesced; widened at each call they cost 2.5 times the bytes.
    if device is DeviceName.CUDA and weights is Weights.INT8:
        raise InvalidArgument("--weights int8 runs on the CPU: give --device cpu, or leave it out")
    if spec.max_new_tokens < 1:
        raise InvalidArgument(f"max-new-tokens is {spec.max_new_tokens}, must be at least 1")
    held = None
    if spec.resume is not None:
        held = _held_session(spec.resume, socket, spec.rejoin_seconds)
    folder = hf.resolve_model(spec.model)
    config = hf.load_config(folder, spec.rope_scaling)
    shape = hf.model_shape(config)
    dtype = _parse_dtype(spec.dtype, device)
    tokenizer = hf.load_tokenizer(folder)
    if held is None:
        ids = _prompt_ids(spec, tokenizer, shape)
        choice, block_tokens, context = (
            parse_codec_choice(spec.codec or CODEC_DEFAULT),
            spec.block_tokens,
            len(ids),
        )
    else:
        ids = build_followup(tokenizer, spec.prompt)
        choice, block_tokens = parse_codec_choice(held["codec"]), int(held["block_tokens"])
        context = int(held["tokens"]) + len(ids)
        dtype = held_dtype(spec, held, folder, shape)
    hf.check_token_ids(config, ids)
    check_length(shape.trained_tokens, context, spec.max_new_tokens, scales=shape.scales)
    sizes = size_tiers(
        shape,
        dtype,
        choice.base,
        codec_layers=choice.layers,
        guarded=spec.guard,
        context_tokens=context,
        max_new_tokens=spec.max_new_tokens,
        hot=spec.hot,
        warm=spec.warm,
        block_tokens=block_tokens,
        kept=spec.keeps,
    )
    if socket is not None:
        stats = _asked(socket, spec.rejoin_seconds, lambda client: client.stats())
        check_daemon_room(sizes, stats, resumed=held is not None)
    namespace = hf.namespace_for(
        folder,
        shape,
        dtype,
        choice.base,
        sizes.block_tokens,
        choice.layers,
        weights,
    )
    return PreparedJob(
        spec, folder, config, shape, tokenizer, ids, namespace, plan, sizes, socket is not None,
        device,
    )  # fmt: skip


def _prompt_ids(spec: JobSpec, tokenizer: Any, shape: hf.ModelShape) -> list[int]:
    """Return a new session's prompt. Raises InvalidArgument once it is seen to be too long."""

    def refuse(least: int) -> None:
        new = spec.max_new_tokens
        check_length(shape.trained_tokens, least, new, is_least=True, scales=shape.scales)

    return build_prompt(
        tokenizer, spec.document, spec.prompt, spec.context_tokens, refuse
    ).token_ids


def _asked(socket: str, rejoin_seconds: float, ask: Callable[[Client], T]) -> T:
    """Return what a daemon says that answered a moment ago; the next one's, if it has died."""
    give_up_at = time.monotonic() + rejoin_seconds
    while True:
        try:
            with Client.connect(socket, kind="tool") as client:
                return ask(client)
        except DaemonUnavailable as error:
            if isinstance(error, DeadlineExceeded) or time.monotonic() >= give_up_at:
                raise
        time.sleep(AGAIN_SECONDS)


def _held_session(session_id: str, socket: str | None, rejoin_seconds: float) -> dict[str, Any]:
    """Return the daemon's row of a suspended session. Raises NotFound, InvalidArgument."""
    if socket is None:
        raise InvalidArgument("a session can be resumed only from the daemon that keeps it")
    row = _asked(socket, rejoin_seconds, lambda client: client.session(session_id))
    if row["state"] != SessionState.SUSPENDED:
        raise InvalidArgument(f"session {session_id} is {row['state']}, not suspended")
    return row


def _parse_dtype(text: str, device: DeviceName) -> DType:
    # On the CPU float32 is the dtype in which raw is token-identical, and decode is faster; on a
    # GPU it would take twice the VRAM and the link.
    if text == "auto":
        return DType.FLOAT32 if device is DeviceName.CPU else DType.BFLOAT16
    try:
        return DType(text)
    except ValueError:
        raise InvalidArgument(
            f"dtype {text!r} is none of auto, float32, bfloat16, float16"
        ) from None


def use_all_cores() -> None:
    """Give torch and Numba the cores this process may run on, the same for both."""
    import numba

    cores = min(len(os.sched_getaffinity(0)), torch.get_num_threads())
    numba.set_num_threads(min(cores, numba.config.NUMBA_NUM_THREADS))
    # After Numba: starting its threads sets torch's count to its own.
    torch.set_num_threads(cores)


def run_job(job: PreparedJob, *, socket: str, events: JobEvents) -> JobReport:
    """Run a prepared job against the daemon at `socket` and return its report."""
    use_all_cores()
    if job.spec.device == DeviceName.AUTO and torch.cuda.is_available() and what_is_missing():
        events.note(f"the GPU is not used: {what_is_missing()}")
    events.working("loading the model")
    model = hf.load_model(job.folder, job.config, job.dtype)
    apply_weights(model, Weights.parse(job.spec.weights))
    with (
        _owned_session(job, socket, events) as (client, handle),
        _device(job, model) as rig,
    ):
        kv = SessionKV(
            client,
            handle,
            job.shape.heads,
            job.sizes.hot_budget_bytes,
            job.sizes.total_tokens,
            job.plan,
            QualityGuard(job.namespace) if job.spec.guard else None,
            rig,
        )
        kv.link.rejoin_seconds = job.spec.rejoin_seconds
        kv.link.waits = lambda seconds: events.note(
            f"the daemon at {socket} is gone; waiting up to {seconds:.0f} s for the next one"
        )
        kv.link.refused = lambda why: events.note(f"the next daemon took nothing back: {why}")
        try:
            events.working("compiling the kernels (kept for the next run)")
            others = kv.guard.codecs() if kv.guard else layer_codecs(job.namespace)
            kv.executors.warm_up({job.codec, *others})
            return _run_session(job, model, client, kv, events)
        except BaseException:
            kv.cancel()  # leaves the epoch: nothing below is read any more
            raise
        finally:
            kv.workings.close()


@contextlib.contextmanager
def _device(job: PreparedJob, model: Any) -> Iterator[DeviceRig | None]:
    """Open the job's device and put the model there. It is closed before slabs are unmapped."""
    rig = open_rig(job.device)
    if rig is None:
        yield None
        return
    try:
        try:
            model.to(rig.device.torch_device)
        except torch.OutOfMemoryError as error:
            raise DeviceUnavailable(
                f"the model's weights do not fit into {rig.device.name}: "
                "give --device cpu, or a smaller model"
            ) from error
        yield rig
    finally:
        rig.close()


@contextlib.contextmanager
def _owned_session(
    job: PreparedJob, socket: str, events: JobEvents
) -> Iterator[tuple[Client, SessionHandle]]:
    """Open or resume the job's session. At the end it is closed, unless it was suspended.

    The daemon keeps a resumed one as it was unless the job is done and drops it: whatever
    ends this process, nothing that was kept is lost.
    """
    client, handle = _opened(job, socket)
    with client:
        yield from _closed_after(job.spec, client, handle, events)


def _opened(job: PreparedJob, socket: str) -> tuple[Client, SessionHandle]:
    """Connect and open. The daemon answered when the job was prepared: if it has died since,
    the next one is waited for, as it is later on."""
    give_up_at = time.monotonic() + job.spec.rejoin_seconds
    while True:
        client: Client | None = None
        try:
            client = Client.connect(socket)
            tokens = job.sizes.total_tokens
            if job.spec.resume is None:
                return client, client.open_session(job.namespace, tokens)
            return client, resume_session(client, job.spec.resume, job.namespace, tokens)
        except TierdError as error:
            if client is not None:
                client.close()
            gone = isinstance(error, DaemonUnavailable) and not isinstance(error, DeadlineExceeded)
            if not gone or time.monotonic() >= give_up_at:
                raise
        time.sleep(AGAIN_SECONDS)


def _closed_after(
    spec: JobSpec, client: Client, handle: SessionHandle, events: JobEvents
) -> Iterator[tuple[Client, SessionHandle]]:
    try:
        yield client, handle
    except BaseException as error:
        handle.close()
        told = isinstance(error, NotKept) and error.says_what_stays
        if spec.resume is not None and not told:
            events.note(f"session {spec.resume} is kept as it was")
        raise
    handle.close(discard=True)


def _run_session(
    job: PreparedJob, model: Any, client: Client, kv: SessionKV, events: JobEvents
) -> JobReport:
    generator = Generator(model, kv)
    generator.note = events.note
    before = kv.link.run(client.stats, repeatable=True)
    ids = job.prompt_ids
    if job.spec.resume is not None:
        held = [int(token) for token in kv.handle.token_ids]
        generator.resume(held, kv.handle.sealed_blocks)
        ids = follow(held, ids)
    total_tokens = len(generator.token_ids) + len(ids)
    timings = Timings(prefill_tokens=total_tokens - kv.position)
    events.prefill_started(total_tokens, kv.position)
    start = time.perf_counter()
    logits = generator.feed(ids, events.prefill_advanced)
    timings.prefill_seconds = time.perf_counter() - start
    prompt_ids, fidelity = list(generator.token_ids), None
    new_ids, kept, text = _decode(job, generator, logits, timings, events)
    kv.check_integrity()
    if job.spec.verify:
        events.note("verifying against the model's own full-precision cache")
        events.working("verifying")
        fidelity = compare_with_own_cache(model, prompt_ids, new_ids, kept)
    stats = before, kv.link.run(client.stats, repeatable=True)
    report = build_report(job, stats, generator, timings, len(new_ids), text, fidelity)
    if job.spec.keeps:
        try:
            generator.suspend(np.array([*prompt_ids, *new_ids], dtype=np.uint32))
        except (KeyboardInterrupt, TierdError) as error:
            if not isinstance(error, TierdError) or isinstance(error, DaemonUnavailable):
                # Asked, and not answered: nobody would look for what is never evicted.
                events.note(f"session {kv.handle.id} may be kept now; tierd sessions says so")
            if isinstance(error, TierdError):
                resumed = job.spec.resume is not None
                raise NotKept(report, error, resumed=resumed) from error
            raise
        report.sections["guard"] = guard_of(job, kv)
    elif job.spec.resume is not None:
        kv.cancel()
        try:
            kv.link.run(kv.handle.discard)
        except TierdError as error:
            raise NotDropped(report, error) from error
    return report


def _decode(
    job: PreparedJob,
    generator: Generator,
    logits: torch.Tensor,
    timings: Timings,
    events: JobEvents,
) -> tuple[list[int], list[torch.Tensor], str]:
    """Return the new token ids, each one's logits if verifying, and the text."""
    stop_ids = set() if job.spec.ignore_eos else hf.stop_token_ids(job.folder, job.tokenizer)
    stream = TextStream(job.tokenizer)
    new_ids: list[int] = []
    kept: list[torch.Tensor] = []
    generator.kv.start_counting()
    start = time.perf_counter()
    while True:
        token = int(logits.argmax())
        new_ids.append(token)
        if job.spec.verify:
            kept.append(logits)
        events.token(stream.push(token))
        if token in stop_ids or len(new_ids) == job.spec.max_new_tokens:
            break
        logits = generator.feed([token])
        timings.decode_steps += 1
    timings.decode_seconds = time.perf_counter() - start
    events.token(stream.end())
    return new_ids, kept, stream.text
