"""How a command ends: the exit code, and one message for a person instead of a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from buckeye.errors import BuckeyeError

DEBUG_VARIABLE = "BUCKEYE_DEBUG"


def run_command(command: Callable[[], int | None]) -> None:
    """Run a command and exit: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C. `--debug` (or
    BUCKEYE_DEBUG=1) adds the traceback."""
    try:
        code = command() or 0
        sys.stdout.flush()
    except BuckeyeError as error:
        code = _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _report("interrupted", 130)
    except BrokenPipeError:  # `| head` closed the pipe: not an error, and nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # a defect of ours: say so in one line
        code = _report(f"unexpected {type(error).__name__}: {error} (add --debug for the traceback)", 1)
    sys.exit(code)


def take_debug_flag(argv: list[str]) -> list[str]:
    """Remove `--debug` and remember it for this process and its children."""
    if "--debug" in argv:
        os.environ[DEBUG_VARIABLE] = "1"
    return [word for word in argv if word != "--debug"]


def _report(message: str, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code
