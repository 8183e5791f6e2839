"""How a command ends: the exit code, and one message for a person instead of a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from buckeye import beat
from buckeye.errors import BuckeyeError
from buckeye.process import raise_open_files_limit

DEBUG_VARIABLE = "BUCKEYE_DEBUG"


def run_command(command: Callable[[], int | None]) -> None:
    """Run a command and exit: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C. `--debug` (or
    BUCKEYE_DEBUG=1) adds the traceback."""
    raise_open_files_limit()
    try:
        code = command() or 0
        sys.stdout.flush()
    except BuckeyeError as error:
        beat.failed(str(error), error=type(error).__name__, final=error.final)
        code = _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _report("interrupted", 130)
    except BrokenPipeError:  # `| head` closed the pipe: not an error, and nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        beat.failed(str(error), error=type(error).__name__, final=False)
        code = _report(_unforeseen(error), 1)
    beat.leave(code)
    sys.exit(code)


def take_debug_flag(argv: list[str]) -> list[str]:
    """Remove `--debug` and remember it for this process and its children."""
    if "--debug" in argv:
        os.environ[DEBUG_VARIABLE] = "1"
    return [word for word in argv if word != "--debug"]


def _unforeseen(error: Exception) -> str:
    """What to say of an error that is none of Buckeye's: a full disk, or a defect."""
    from buckeye.space import disk_is_full

    if disk_is_full(error):
        return (
            f"the disk is full ({error}). Free some space (`buckeye rl clean RUN` may help), and try again."
        )
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename}: permission denied. Its owner can do this, or let you."
    return f"unexpected {type(error).__name__}: {error} (add --debug for the traceback)"


def _report(message: str, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code
