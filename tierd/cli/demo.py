"""`tierd demo`: the main job on a model and a document that need no download."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.cli import checks, options
from tierd.cli.document import language_reference
from tierd.cli.job import Display, Placement, run_job_command
from tierd.cli.streams import warn

MODEL = "SmolLM2-135M-Instruct"
DOCUMENT = "CPython's language reference"
QUESTION = "Which statements does this text describe?"

Context = Annotated[
    int,
    typer.Option(
        "--context",
        min=options.CONTEXT_MIN,
        max=options.TOKENS_MAX,
        metavar="N",
        help="Tokens of the whole prompt.",
    ),
]


def demo(
    context: Context = 4096,
    hot: options.Hot = None,
    warm: options.Warm = None,
    cold_dir: options.ColdDir = None,
    codec: options.Codec = None,
    no_guard: options.NoGuard = False,
    plan: options.Plan = options.PlanName.AUTO,
    max_new_tokens: options.MaxNewTokens = 128,
    ignore_eos: options.IgnoreEos = False,
    verify: options.Verify = False,
    dtype: options.DType = options.DTypeName.AUTO,
    block_tokens: options.BlockTokens = None,
    rope_scaling: options.RopeScaling = None,
    weights: options.Weights = options.WeightsName.AUTO,
    device: options.Device = options.DeviceName.AUTO,
    daemon: options.JobDaemon = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """SmolLM2 reads CPython's language reference and answers, its KV over three tiers."""
    placement = Placement(daemon, hot, warm, cold_dir)
    checks.device(device, weights)

    document = language_reference()

    fields = dict(
        model=MODEL,
        document=document,
        prompt=QUESTION,
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
    )

    if not (quiet or as_json):
        warn(f"{MODEL} reads {DOCUMENT}, {context:,} tokens in all, and is asked: {QUESTION}")
    display = Display(as_json, quiet)
    raise typer.Exit(run_job_command(fields, placement, display))
