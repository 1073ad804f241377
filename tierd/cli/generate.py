"""`tierd generate`: the main job on the user's own model and document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from tierd.cli import checks, options
from tierd.cli.document import read_document
from tierd.cli.job import Display, Placement, run_job_command
from tierd.errors import InvalidArgument

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="DIR_OR_NAME",
        callback=options.checked("--model", checks.named),
        help="A folder in Hugging Face layout, a .gguf file, or SmolLM2-135M-Instruct.",
    ),
]
Document = Annotated[
    str | None,
    typer.Option(
        "--document",
        metavar="FILE",
        callback=options.checked("--document", checks.named),
        help="UTF-8 text, or - for stdin.",
    ),
]
Prompt = Annotated[
    str,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        callback=options.checked("--prompt", checks.text),
        help="What to do with it.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=options.CONTEXT_MIN,
        max=options.TOKENS_MAX,
        metavar="N",
        help="Tokens of the whole prompt, the document cut to fit.  \\[default: all of it]",
    ),
]


def generate(
    model: Model,
    prompt: Prompt,
    document: Document = None,
    context: Context = None,
    hot: options.Hot = None,
    warm: options.Warm = None,
    cold_dir: options.ColdDir = None,
    codec: options.Codec = None,
    no_guard: options.NoGuard = False,
    plan: options.Plan = options.PlanName.AUTO,
    max_new_tokens: options.MaxNewTokens = 256,
    ignore_eos: options.IgnoreEos = False,
    verify: options.Verify = False,
    dtype: options.DType = options.DTypeName.AUTO,
    block_tokens: options.BlockTokens = None,
    rope_scaling: options.RopeScaling = None,
    weights: options.Weights = options.WeightsName.AUTO,
    device: options.Device = options.DeviceName.AUTO,
    daemon: options.JobDaemon = None,
    keep: options.Keep = False,
    resume: options.Resume = None,
    drop: options.Drop = False,
    rejoin: options.Rejoin = "30s",
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """A model reads a document and answers, its KV over three tiers."""
    _check_session_options(daemon, keep=keep, resume=resume, drop=drop)
    if resume is not None:
        fixed = {"--document": document, "--context": context, "--codec": codec,
                 "--block-tokens": block_tokens}  # fmt: skip
        _refuse_with_resume(fixed)
    placement = Placement(daemon, hot, warm, cold_dir)
    checks.device(device, weights)
    text = "" if resume is not None else _document_text(document)

    fields = dict(
        model=model,
        document=text,
        prompt=prompt,
        context_tokens=context,
        hot=hot,
        warm=warm,
        codec=codec,
        guard=not no_guard,
        plan=plan,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        verify=verify,
        dtype=dtype,
        block_tokens=block_tokens,
        rope_scaling=rope_scaling,
        weights=weights,
        device=device,
        keep=keep,
        resume=resume,
        drop=drop,
        rejoin_seconds=checks.duration("--rejoin", rejoin),
    )

    display = Display(as_json, quiet)
    raise typer.Exit(run_job_command(fields, placement, display))


def _check_session_options(
    daemon: str | None, *, keep: bool, resume: str | None, drop: bool
) -> None:
    if daemon is None and (keep or resume is not None):
        raise InvalidArgument("--keep and --resume need --daemon: a job's own daemon ends with it")
    if drop and resume is None:
        raise InvalidArgument("--drop goes with --resume: a new session is dropped without --keep")
    if drop and keep:
        raise InvalidArgument("--keep and --drop exclude each other")


def _refuse_with_resume(fixed: Mapping[str, object]) -> None:
    for option, value in fixed.items():
        if value is not None:
            raise InvalidArgument(
                f"{option} and --resume exclude each other: a kept session has its document, "
                "codec and block size already; give it the next --prompt"
            )


def _document_text(document: str | None) -> str:
    if document is None:
        raise InvalidArgument("give --document, or --resume a session that has read one")
    return read_document(document)
