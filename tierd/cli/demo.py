"""`tierd demo`: the main job on a model and a document that need no download."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.cli import options
from tierd.cli.document import language_reference
from tierd.cli.job import Display, Placement, run_job_command
from tierd.cli.terminal import hush_libraries

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Which statements does this text describe?"

Context = Annotated[
    int, typer.Option("--context", min=1, metavar="N", help="Tokens of the whole prompt.")
]


def demo(
    context: Context = 4096,
    hot: options.Hot = "25%",
    warm: options.Warm = None,
    cold_dir: options.ColdDir = None,
    codec: options.Codec = options.CodecName.INT8,
    plan: options.Plan = options.PlanName.AUTO,
    max_new_tokens: options.MaxNewTokens = 128,
    ignore_eos: options.IgnoreEos = False,
    verify: options.Verify = False,
    dtype: options.DType = options.DTypeName.AUTO,
    block_tokens: options.BlockTokens = None,
    rope_scaling: options.RopeScaling = None,
    daemon: options.JobDaemon = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """SmolLM2 reads CPython's language reference and answers, its KV over three tiers."""
    placement = Placement(daemon, warm, cold_dir)
    hush_libraries(quiet=quiet or as_json)
    # torch takes seconds to import: what can be refused without it already was.
    from tierd_engine.runner import JobSpec

    spec = JobSpec(
        model=MODEL,
        document=language_reference(),
        prompt=QUESTION,
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
    )
    raise typer.Exit(run_job_command(spec, placement, Display(as_json, quiet)))
