"""The command line's verbs, wired; every foreseeable failure becomes one line.

Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon unreachable, 4 degraded, 5 not found,
128 + n ended by signal n (130: Ctrl-C), 141 its output's reader left. A traceback
reaches the user only for a bug.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tierd import __version__
from tierd.cli import (
    config,
    demo,
    doctor,
    exits,
    fsck,
    generate,
    hint,
    interrupts,
    serve,
    sessions,
    stats,
)
from tierd.cli.shortage import is_shortage, limit_named
from tierd.cli.streams import ReaderGone, mute, warn, writing
from tierd.errors import TierdError
from tierd.memorywords import NO_THREAD

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


_VERBS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "generate": generate.generate,
    "serve": serve.serve,
    "stats": stats.stats,
    "sessions": sessions.sessions,
    "hint": hint.hint,
    "doctor": doctor.doctor,
    "fsck": fsck.fsck,
}


class _Command(TyperCommand):
    """A verb whose help is written like all else."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help. Raises ReaderGone, OutputFailed."""
        with writing():
            super().format_help(ctx, formatter)


class _Group(TyperGroup):
    """Verbs whose help is written like all else, also where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments; without any, write the help and end. Raises typer.Exit too."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), color=ctx.color)
            raise typer.Exit(exits.USAGE)
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help. Raises ReaderGone, OutputFailed."""
        with writing():
            super().format_help(ctx, formatter)


def _print_version(wanted: bool) -> None:
    if wanted:
        with writing() as out:
            print(f"tierd {__version__}", file=out)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Run long-context LLM jobs whose KV lives in three tiers: hot, warm and cold."""


def build_app() -> typer.Typer:
    """Return the command with all its verbs."""
    app = typer.Typer(
        cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    for name, verb in _VERBS.items():
        app.command(name, cls=_Command)(verb)
    app.add_typer(config.build_app(_Command), name="config", cls=_Group)
    return app


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(argv)
    except ReaderGone:
        mute()
        return exits.READER_GONE  # quietly: nothing to say, and nowhere to say it
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception:
        if interrupts.exit_code() is None:
            raise
        return _interrupted()  # what a library made of it
    return _interrupted() if code == exits.INTERRUPTED else code


def _run(argv: Sequence[str] | None) -> int:
    arguments = None if argv is None else list(argv)
    try:
        result = build_app()(args=arguments, prog_name="tierd", standalone_mode=False)
    except TierdError as error:
        return _fail(str(error) + _limit_of(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(f"{_usage_message(error)} Try: {_help_for(error)}", error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        return _fail(
            f"this needs {package}; install it with: pip install 'tierd[{extra}]'", exits.FAILED
        )
    except ImportError as error:  # a library's file that cannot be opened, or is another's
        return _fail(f"a library cannot be loaded: {error}{_limit_of(error)}", exits.FAILED)
    except (BrokenPipeError, SystemExit) as error:
        # Outside of standalone mode, typer exits by itself only for a broken pipe.
        raise ReaderGone from error
    except OSError as error:
        return _fail(_reason(error) + _limit_of(error), exits.FAILED)
    except MemoryError as error:
        said = f"out of memory: {error}".rstrip(": ")
        return _fail(said + _limit_of(error), exits.FAILED)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        if NO_THREAD in str(error):
            hint = _limit_of(error) or "; raise ulimit -u"
            return _fail(f"the host gives no more threads{hint}", exits.FAILED)
        said = str(error).partition("\n")[0]  # torch adds where in its sources
        return _fail(f"out of memory: {said}{_limit_of(error)}", exits.FAILED)
    # Outside of standalone mode, typer returns what `typer.Exit` carried.
    return result if isinstance(result, int) else 0


def _usage_message(error: typer.TyperException) -> str:
    message = str(error.format_message()).replace("Value error, ", "")
    errors = getattr(error.__cause__, "errors", None)
    if errors is not None:  # typer's own reader of numbers names the option, and not the value
        message = message.replace("Input should", f"{errors()[0]['input']!r} should")
    return "no command is named." if message == "No such command ''." else message


def _reason(error: OSError) -> str:
    """Return what went wrong with which file, without the error's number."""
    where = [os.fsdecode(name) for name in (error.filename, error.filename2) if name]
    return ": ".join([*where, error.strerror or str(error)])


def _limit_of(error: BaseException) -> str:
    """Return which limit of the process an error, or what it came of, may stem from; or "".

    An error that names one has none added.
    """
    if "raise its ulimit -n" in str(error):
        return ""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"; the process may open {most} files: raise ulimit -n"
        if is_shortage(cause) and limit_named():
            return f"; {limit_named()}"
        cause = cause.__cause__ or cause.__context__
    return ""


def _help_for(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'tierd'} --help"


def _fail(message: str, code: int) -> int:
    if interrupts.exit_code() is not None:
        return _interrupted()  # it failed because it was to end
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    warn(f"error: {' '.join(lines) or 'failed, without a reason given'}")
    return code


def _interrupted() -> int:
    warn("interrupted")
    return interrupts.exit_code() or exits.INTERRUPTED
