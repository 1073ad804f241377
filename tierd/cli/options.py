"""Options that several verbs share: one declaration each."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tierd.cli import checks
from tierd.errors import InvalidArgument
from tierd.layercodecs import CODEC_NAMES, parse_codec_choice

TOKENS_MAX = 2**31 - 1  # a thousand times the longest context of any model
CONTEXT_MIN = 2  # a token of the document and one of the prompt


def checked(option: str, check: Callable[[str, Any], object]) -> Callable[[Any], Any]:
    """Return a callback that has `check(option, value)` refuse what was given.

    It is called as the value is read: what is wrong is named before what is missing, and before
    a verb has done anything.
    """

    def refuse(value: Any) -> Any:
        if value is not None:
            check(option, value)
        return value

    return refuse


class PlanName(enum.StrEnum):
    """Executors for pages below the hot tier."""

    STREAM = "stream"
    NEAR = "near"
    AUTO = "auto"


class DTypeName(enum.StrEnum):
    """The dtype the model computes and keeps its KV in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(enum.StrEnum):
    """Where the model and the hot tier are."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class WeightsName(enum.StrEnum):
    """How the model's linear layers are kept."""

    AUTO = "auto"
    INT8 = "int8"


Hot = Annotated[
    str | None,
    typer.Option(
        "--hot",
        metavar="SIZE",
        callback=checked("--hot", checks.budget),
        help="Hot tier: bytes, or percent of the KV.  \\[default: 25%, or the least that works]",
    ),
]
Warm = Annotated[
    str | None,
    typer.Option(
        "--warm",
        metavar="SIZE",
        callback=checked("--warm", checks.budget),
        help="Warm tier: bytes, or percent of the KV.  \\[default: 25%, or the least that works]",
    ),
]
ColdDir = Annotated[
    str | None,
    typer.Option(
        "--cold-dir",
        metavar="DIR",
        callback=checked("--cold-dir", checks.named),
        help="Folder for what hot and warm do not hold; made if its parent is there.  "
        "\\[default: /var/tmp]",
    ),
]


def _codec(value: str | None) -> str | None:
    """Refuse, before anything slow is imported, what is no codec."""
    if value is not None:
        name = value.split(",")[0].strip().lower()
        if name not in CODEC_NAMES and ":" not in name:
            names = ", ".join(f"'{known}'" for known in CODEC_NAMES)
            raise typer.BadParameter(f"{value!r} is not one of {names}.")
        try:
            parse_codec_choice(value)
        except InvalidArgument as error:
            raise typer.BadParameter(str(error)) from None
    return value


Codec = Annotated[
    str | None,
    typer.Option(
        "--codec",
        metavar="raw|int8|k8v4|int4|fp8[,layers:A-B=CODEC]",
        callback=_codec,
        help="How pages are stored below hot; layers may differ, as in k8v4,layers:0-1=int8.  "
        "\\[default: int8]",
    ),
]
NoGuard = Annotated[
    bool,
    typer.Option(
        "--no-guard",
        help="Keep to --codec, also in layers where it moves attention's output too far.",
    ),
]
Plan = Annotated[PlanName, typer.Option("--plan", help="How pages below hot are attended.")]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        min=1,
        max=TOKENS_MAX,
        metavar="N",
        help="Length of the answer at most.",
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens, past the answer's end.")
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Leave the session with the daemon, suspended, for --resume (needs --daemon). "
        "A resumed session is kept without it.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="SESSION",
        callback=checked("--resume", checks.session),
        help="Ask more of a kept session, with --prompt and without --document. It is kept "
        "again, with the answer; as it was, if the job fails.",
    ),
]
Drop = Annotated[
    bool, typer.Option("--drop", help="With --resume: do not keep the session after the answer.")
]
Rejoin = Annotated[
    str,
    typer.Option(
        "--rejoin",
        metavar="DURATION",
        callback=checked("--rejoin", checks.duration),
        help="How long to wait for the next daemon when the job's has died, or for one that stands "
        "still (10s at least: what a call to it has).",
    ),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Also run the model's own full-precision cache, and compare."),
]
DType = Annotated[DTypeName, typer.Option("--dtype", help="Dtype of the model and its KV.")]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--block-tokens",
        metavar="N",
        callback=checked("--block-tokens", checks.block_tokens),
        help="Tokens of a block, a power of two.  \\[default: up to 256]",
    ),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(
        "--rope-scaling",
        metavar="KIND:FACTOR",
        callback=checked("--rope-scaling", checks.rope_scaling),
        help="Go beyond the trained length: linear:FACTOR or yarn:FACTOR.",
    ),
]
Weights = Annotated[
    WeightsName,
    typer.Option(
        "--weights",
        help="int8: the model's linear layers in 8 bits, faster at each token, at a loss that "
        "scripts/bench weights measures.",
    ),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        "--device",
        help="Where the model and the hot tier are; auto: a CUDA device if there is one.",
    ),
]
JobDaemon = Annotated[
    str | None,
    typer.Option(
        "--daemon",
        metavar="SOCKET",
        callback=checked("--daemon", checks.named),
        help="Use this daemon, not one of the job's own.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="The answer's text only: no progress, no tables.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Daemon = Annotated[
    str | None,
    typer.Option(
        "--daemon",
        metavar="SOCKET",
        callback=checked("--daemon", checks.named),
        help="The daemon's socket, if not the usual one.",
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=checked("--config", checks.named),
        help="A TOML file of settings.",
    ),
]
