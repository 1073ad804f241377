"""`tierd generate`: the main job on the user's own model and document."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.cli import options
from tierd.cli.document import read_document
from tierd.cli.job import Display, Placement, run_job_command
from tierd.cli.terminal import hush_libraries
from tierd.errors import InvalidArgument

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="DIR_OR_NAME",
        help="A folder in Hugging Face layout, a .gguf file, or SmolLM2-135M-Instruct.",
    ),
]
Document = Annotated[
    str | None, typer.Option("--document", metavar="FILE", help="UTF-8 text, or - for stdin.")
]
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to do with it.")]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        metavar="N",
        help="Tokens of the whole prompt, the document cut to fit.  \\[default: all of it]",
    ),
]


def generate(
    model: Model,
    prompt: Prompt,
    document: Document = None,
    context: Context = None,
    hot: options.Hot = "25%",
    warm: options.Warm = None,
    cold_dir: options.ColdDir = None,
    codec: options.Codec = options.CodecName.INT8,
    plan: options.Plan = options.PlanName.AUTO,
    max_new_tokens: options.MaxNewTokens = 256,
    ignore_eos: options.IgnoreEos = False,
    verify: options.Verify = False,
    dtype: options.DType = options.DTypeName.AUTO,
    block_tokens: options.BlockTokens = None,
    rope_scaling: options.RopeScaling = None,
    daemon: options.JobDaemon = None,
    keep: options.Keep = False,
    resume: options.Resume = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """A model reads a document and answers, its KV over three tiers."""
    placement = Placement(daemon, warm, cold_dir)
    text = _document_text(document, resume)
    if daemon is None and (keep or resume is not None):
        raise InvalidArgument("--keep and --resume need --daemon: a job's own daemon ends with it")
    hush_libraries(quiet=quiet or as_json)
    # torch takes seconds to import: what can be refused without it already was.
    from tierd_engine.runner import JobSpec

    spec = JobSpec(
        model=model,
        document=text,
        prompt=prompt,
        context_tokens=context,
        hot=hot,
        warm=placement.warm_share,
        codec=codec,
        plan=plan,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        verify=verify,
        dtype=dtype,
        block_tokens=block_tokens,
        rope_scaling=rope_scaling,
        keep=keep,
        resume=resume,
    )
    raise typer.Exit(run_job_command(spec, placement, Display(as_json, quiet)))


def _document_text(document: str | None, resume: str | None) -> str:
    if (document is None) == (resume is None):
        raise InvalidArgument("give --document, or --resume a session that has read one")
    return "" if document is None else read_document(document)
