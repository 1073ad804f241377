"""The command line's door: verbs are wired here, and every foreseeable failure becomes one line.

Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon unreachable, 4 degraded, 5 not found,
130 interrupted. A traceback reaches the user only for a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tierd import __version__
from tierd.cli import config, demo, doctor, exits, generate, hint, serve, sessions, stats
from tierd.cli.terminal import warn
from tierd.errors import TierdError

# Which extra brings a package that a verb imports.
_EXTRAS = {
    "aiofiles": "daemon",
    "grpc_health": "daemon",
    "grpc_reflection": "daemon",
    "prometheus_client": "daemon",
    "structlog": "daemon",
    "numba": "engine",
    "safetensors": "engine",
    "torch": "engine",
    "transformers": "engine",
    "accelerate": "demo",
    "gguf": "demo",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tierd {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Run long-context LLM jobs whose KV lives in three tiers: hot, warm and cold."""


def build_app() -> typer.Typer:
    """Return the command with all its verbs."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    app.command("demo")(demo.demo)
    app.command("generate")(generate.generate)
    app.command("serve")(serve.serve)
    app.command("stats")(stats.stats)
    app.command("sessions")(sessions.sessions)
    app.command("hint")(hint.hint)
    app.command("doctor")(doctor.doctor)
    app.add_typer(config.app, name="config")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`tierd stats | head`): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED
    return code


def _run(argv: Sequence[str] | None) -> int:
    arguments = None if argv is None else list(argv)
    try:
        result = build_app()(args=arguments, prog_name="tierd", standalone_mode=False)
    except TierdError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(f"{error.format_message()} Try: {_help_for(error)}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        return _fail(
            f"this needs {package}; install it with: pip install 'tierd[{extra}]'", exits.FAILED
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(str(error), exits.FAILED)
    except MemoryError as error:
        return _fail(f"out of memory: {error}", exits.FAILED)
    # Outside of standalone mode, typer returns what `typer.Exit` carried.
    code = result if isinstance(result, int) else 0
    return _interrupted() if code == exits.INTERRUPTED else code


def _help_for(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'tierd'} --help"


def _fail(message: str, code: int) -> int:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    warn(f"error: {' '.join(lines) or 'failed, without a reason given'}")
    return code


def _interrupted() -> int:
    warn("interrupted")
    return exits.INTERRUPTED
