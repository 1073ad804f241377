"""Long-document jobs: a model reads a document, answers a question, and a report says how.

`size_job` tells what a job needs before anything is allocated; `run_job` runs
it against a daemon's socket.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tierd.client import Client
from tierd.codec import parse_codec
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, SessionState
from tierd_engine import hf
from tierd_engine.attention.plan import PlanMode
from tierd_engine.fidelity import compare_with_own_cache
from tierd_engine.generator import Generator
from tierd_engine.prompt import TextStream, build_followup, build_prompt, follow
from tierd_engine.report import JobReport, build_report
from tierd_engine.session import SessionKV
from tierd_engine.sizing import JobSizes, check_length, size_tiers
from tierd_engine.warmup import warm_up


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a user asks for. `hot` and `warm` are sizes ("64MiB") or shares of the KV ("25%").

    `context_tokens`: exact length of the prompt, the document cut to fit; None
    takes the whole document. `block_tokens` None: the largest of 256..16 of
    which the hot budget holds two. `keep`: suspend the session at the end, so
    that another job can `resume` it by its id and ask more, without the document.
    """

    model: str
    document: str
    prompt: str
    context_tokens: int | None = None
    hot: str = "25%"
    warm: str = "25%"
    codec: str = "int8"
    plan: str = "auto"
    max_new_tokens: int = 128
    ignore_eos: bool = False
    verify: bool = False
    dtype: str = "auto"
    block_tokens: int | None = None
    rope_scaling: str | None = None
    keep: bool = False
    resume: str | None = None


class JobEvents(Protocol):
    """What a job tells while it runs. Called on the job's thread."""

    def prefill_started(self, total_tokens: int) -> None:
        """Prefill of `total_tokens` begins."""

    def prefill_advanced(self, done_tokens: int) -> None:
        """The session now holds `done_tokens`."""

    def token(self, text: str) -> None:
        """More text of the answer, whole characters; may be empty."""

    def note(self, text: str) -> None:
        """One line worth telling the user."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job whose model is found and whose prompt is tokenised.

    `prompt_ids`: what is fed first; `held_tokens`: what a resumed session has already.
    """

    spec: JobSpec
    folder: Path
    config: Any
    shape: hf.ModelShape
    tokenizer: Any
    prompt_ids: list[int]
    held_tokens: int
    dtype: DType
    codec: CodecId
    plan: PlanMode
    sizes: JobSizes


@dataclass(slots=True)
class Timings:
    """Wall-clock of a job's two phases. A decode step makes one token."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0


def prepare_job(spec: JobSpec, socket: str | None = None) -> PreparedJob:
    """Find the model, tokenise the prompt and size the tiers. Loads no weights.

    `socket`: the daemon that keeps the session to resume, where there is one.
    """
    plan = PlanMode.parse(spec.plan)
    if spec.max_new_tokens < 1:
        raise InvalidArgument(f"max-new-tokens is {spec.max_new_tokens}, must be at least 1")
    held = _held_session(spec.resume, socket) if spec.resume is not None else None
    codec = parse_codec(spec.codec) if held is None else parse_codec(held["codec"])
    folder = hf.resolve_model(spec.model)
    config = hf.load_config(folder, spec.rope_scaling)
    shape = hf.model_shape(config)
    dtype = _parse_dtype(spec.dtype)
    tokenizer = hf.load_tokenizer(folder)
    if held is None:
        ids = build_prompt(tokenizer, spec.document, spec.prompt, spec.context_tokens).token_ids
    else:
        ids = build_followup(tokenizer, spec.prompt)
    held_tokens = 0 if held is None else int(held["tokens"])
    context = held_tokens + len(ids)
    check_length(shape, context, spec.max_new_tokens)
    sizes = size_tiers(
        shape,
        dtype,
        codec,
        context_tokens=context,
        max_new_tokens=spec.max_new_tokens,
        hot=spec.hot,
        warm=spec.warm,
        block_tokens=spec.block_tokens if held is None else int(held["block_tokens"]),
    )
    return PreparedJob(
        spec, folder, config, shape, tokenizer, ids, held_tokens, dtype, codec, plan, sizes
    )


def _held_session(session_id: str, socket: str | None) -> dict[str, Any]:
    """Return the daemon's row of a suspended session. Raises NotFound, InvalidArgument."""
    if socket is None:
        raise InvalidArgument("a session can be resumed only from the daemon that keeps it")
    with Client.connect(socket, kind="tool") as client:
        row = client.session(session_id)
    if row["state"] != SessionState.SUSPENDED:
        raise InvalidArgument(f"session {session_id} is {row['state']}, not suspended")
    return row


def _parse_dtype(text: str) -> DType:
    # On the CPU float32 is the dtype in which raw is token-identical, and decode is faster.
    if text == "auto":
        return DType.FLOAT32
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
    model = hf.load_model(job.folder, job.config, job.dtype)
    namespace = hf.namespace_for(
        job.folder, job.shape, job.dtype, job.codec, job.sizes.block_tokens
    )
    with Client.connect(socket) as client:
        if job.spec.resume is None:
            handle = client.open_session(namespace, job.sizes.total_tokens)
        else:
            handle = client.resume(job.spec.resume, namespace, job.sizes.total_tokens)
        kv = SessionKV(
            client,
            handle,
            job.shape.heads,
            job.sizes.hot_budget_bytes,
            job.sizes.total_tokens,
            job.plan,
        )
        try:
            warm_up(kv.geometry, job.shape.heads, job.codec, kv.executors.staging)
            return _run_session(job, model, client, kv, events)
        finally:
            kv.close()


def _run_session(
    job: PreparedJob, model: Any, client: Client, kv: SessionKV, events: JobEvents
) -> JobReport:
    generator = Generator(model, kv)
    ids = job.prompt_ids
    if job.spec.resume is not None:
        held = [int(token) for token in kv.handle.token_ids]
        generator.resume(held, kv.handle.sealed_blocks)
        ids = follow(held, ids)
    timings = Timings(prefill_tokens=len(generator.token_ids) + len(ids) - kv.position)
    events.prefill_started(len(generator.token_ids) + len(ids))
    start = time.perf_counter()
    logits = generator.feed(ids, events.prefill_advanced)
    timings.prefill_seconds = time.perf_counter() - start
    prompt_ids = list(generator.token_ids)
    new_ids, kept, text = _decode(job, generator, logits, timings, events)
    kv.check_integrity()
    fidelity = None
    if job.spec.verify:
        events.note("verifying against the model's own full-precision cache")
        fidelity = compare_with_own_cache(model, prompt_ids, new_ids, kept)
    report = build_report(job, client, generator, timings, len(new_ids), text, fidelity)
    if job.spec.keep:
        kv.suspend(np.array([*prompt_ids, *new_ids], dtype=np.uint32))
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
