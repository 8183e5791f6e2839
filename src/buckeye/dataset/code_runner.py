"""Program that runs Python code against tests: `python -I code_runner.py RESULT`.

It reads `{"code", "tests", "seconds"}` as JSON from standard input, and writes the number of passed tests,
with a reason for each failed one, to the file RESULT. Each test runs in its own process. It imports nothing
of Buckeye.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

_MAX_OUTPUT = 2**20
_MAX_REASON = 300


def main(result: str) -> None:
    """Run the tests, and write the result."""
    request = json.load(sys.stdin)
    failures = []
    for test in request["tests"]:
        failure = _run_test(request["code"], test, float(request["seconds"]))
        failures += [] if failure is None else [failure[:_MAX_REASON]]
    with open(result, "w") as file:
        json.dump({"passed": len(request["tests"]) - len(failures), "failures": failures}, file)


def _run_test(code: str, test: dict[str, str], seconds: float) -> str | None:
    """Return None if the test passes, else the reason."""
    done, done_by_child = os.pipe()
    token = os.urandom(16)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(test.get("input", "").encode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(given.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.close(done)
            _run_in_child(code, test, done_by_child, token)
        os.close(done_by_child)
        in_time = _wait(child, seconds)
        finished = os.read(done, len(token)) == token if in_time else False
        os.close(done)
        output.seek(0)
        text = output.read(_MAX_OUTPUT).decode("utf-8", "replace")
    if not in_time:
        return f"timeout after {seconds:g} s"
    if not finished:
        return text.strip().rpartition("\n")[2] or "the code ended the process"
    if "output" in test and _lines(text) != _lines(test["output"]):
        return f"expected the output {test['output'].strip()[:100]!r}, found {text.strip()[:100]!r}"
    return None


def _wait(child: int, seconds: float) -> bool:
    """Return True if the child ends in time. It and its own children are killed in any case."""
    deadline, pause = time.monotonic() + seconds, 0.001
    ended = False
    while not ended and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
        ended = os.waitpid(child, os.WNOHANG)[0] == child
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return ended


def _run_in_child(code: str, test: dict[str, str], done: int, token: bytes) -> NoReturn:
    """Run the code and its test, write the token if nothing failed, and end this process."""
    names: dict[str, Any] = {"__name__": "__main__" if "output" in test else "reply"}
    try:
        exec(compile(code, "reply.py", "exec"), names)  # noqa: S102  confined, in a process of its own
        if "code" in test:
            exec(compile(test["code"], "test.py", "exec"), names)  # noqa: S102
            if "check(" in test["code"] and "def check" in test["code"] and "entry_point" in test:
                names["check"](names[test["entry_point"]])
        sys.stdout.flush()
        os.write(done, token)
    except SystemExit as error:
        sys.stdout.flush()
        if error.code in (None, 0) and "output" in test:  # a program may end so
            os.write(done, token)
        else:
            sys.stderr.write(f"SystemExit: {error.code}")
    except BaseException as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
