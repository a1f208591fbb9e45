"""How a command ends: its exit code, and what is said when it failed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from safepoint.errors import Damaged, LeaseHeld, NotFound, SafepointError, Unavailable, UsageError

__all__ = ["EXIT_CODES", "STORE", "code_of", "run"]

STORE = "safepoint.store"
"""Where a command keeps the --store that it was given."""

_BY_TYPE: tuple[tuple[type[SafepointError], int], ...] = ((NotFound, 3), (Unavailable, 4), (LeaseHeld, 5), (Damaged, 6))

EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "done; `check` may have found warnings"),
    (1, "`check` found an error, or a question of the command was not answered with yes: nothing was changed"),
    (2, "the command was used wrongly, or any error that is not named below"),
    (3, "`NotFound`: there is no such store, task, checkpoint, branch, call or pause"),
    (4, "`Unavailable`: the store cannot be reached, or did not answer in time"),
    (5, "`LeaseHeld`: a live run holds the task"),
    (6, "`Damaged`: what is stored does not pass its own check"),
    (130, "interrupted (Ctrl-C)"),
    (141, "whoever read the output has stopped reading, a closed pipe"),
)


def code_of(error: SafepointError) -> int:
    return next((code for cls, code in _BY_TYPE if isinstance(error, cls)), 2)


def run(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has not all of Unicode gets escapes, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    import click

    from safepoint.cli.everything import cli

    meta: dict[str, Any] = {}
    if "_SAFEPOINT_COMPLETE" in os.environ:  # a shell asks for completions
        cli.main(args, prog_name="safepoint")
    try:
        # Not cli.main(): it would print errors in its own way, and end the process.
        with cli.make_context("safepoint", args) as context:
            meta = context.meta  # one for all commands
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return _failed(_as_usage(error), as_json)
    except SafepointError as error:
        return _failed(error, as_json, store=meta.get(STORE))
    except click.Abort:
        return _failed(UsageError("not confirmed", "nothing was changed", "Answer y, or give --yes."), as_json, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        # Python writes what is left once more when it ends, and would complain again.
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("SAFEPOINT_TRACEBACK"):
            raise
        return _failed(_unforeseen(error), as_json)


def _unforeseen(error: Exception) -> SafepointError:
    """A fault of ours, or of the machine. Its text is not shown: it may quote what is stored."""
    if isinstance(error, OSError) and error.strerror:
        with suppress(OSError, ValueError, AttributeError):  # the output may be what failed, and would fail again at the end
            sys.stdout.flush()
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SafepointError(f"the system refused: {error.strerror}", "", "Look at the disk, and at where the output goes.")
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{os.path.basename(frame.tb_frame.f_code.co_filename)}, line {frame.tb_lineno}" if frame is not None else ""
    return SafepointError(
        f"an error that safepoint did not foresee: {type(error).__name__}",
        place,
        "Report it; with SAFEPOINT_TRACEBACK=1 the traceback is shown.",
    )


def _as_usage(error: object) -> UsageError:
    """click's own refusals in the words of the library: one form for whoever reads them."""
    import click

    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context is not None else "safepoint"
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return UsageError(text.rstrip("."), "", f"See `{path} --help`.")


def _failed(error: SafepointError, as_json: bool, code: int | None = None, store: str | None = None) -> int:
    """People read stderr, programs stdout: with ``--json`` exactly one JSON document is there, whatever happened."""
    from safepoint.cli import facts
    from safepoint.cli.text import clean, dumps, in_shell

    remedy = in_shell(error.remedy, store)
    code = code_of(error) if code is None else code
    lines = [f"error: {error.what}"]
    lines += [f"  why: {error.why}"] if error.why else []
    lines += [f"  remedy: {remedy}"] if remedy else []
    try:
        if as_json:
            sys.stdout.write(dumps({"error": {**facts.error(error, remedy), "exit_code": code}}) + "\n")
            sys.stdout.flush()
        sys.stderr.write("".join(clean(line) + "\n" for line in lines))
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # nobody listens
        pass
    return code
