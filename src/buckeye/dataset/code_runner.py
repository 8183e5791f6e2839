"""Program that runs Python code against tests: `python -I code_runner.py RESULT`.

It reads `{"code", "tests", "seconds", "key"}` as JSON from standard input, and writes `{"passed", "failures",
"key"}` to the file RESULT. Each test runs in its own process, `python -I code_runner.py --test FD`, which
does not receive expected outputs. The program imports nothing of Buckeye.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from typing import IO, Any, NoReturn

_MAX_OUTPUT = 2**20
_MAX_FILE = 2**26
_MAX_REASON = 300
_PR_SET_DUMPABLE = 4


def main(result: str) -> None:
    """Run the tests of the request on stdin, and write the result to the file `result`."""
    request = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the tested code cannot read this process
    failures = []
    for test in request["tests"]:
        failure = _run_test(request["code"], test, float(request["seconds"]))
        failures += [] if failure is None else [failure[:_MAX_REASON]]
    passed = len(request["tests"]) - len(failures)
    with open(result, "w") as file:
        json.dump({"passed": passed, "failures": failures, "key": request["key"]}, file)


def _run_test(code: str, test: dict[str, str], seconds: float) -> str | None:
    """Return None if the test passes, else the reason."""
    token = os.urandom(16)
    request = {"code": code, "test": test.get("code"), "token": token.hex()}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as channel,
    ):
        _fill(given, test.get("input", ""))
        _fill(channel, json.dumps(request))
        child = subprocess.Popen(  # noqa: S603  this file
            [sys.executable, "-I", "-B", os.path.abspath(__file__), "--test", str(channel.fileno())],
            stdin=given,
            stdout=output,
            stderr=errors,
            cwd=folder,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )
        in_time = _wait(child, seconds)
        finished = os.pread(channel.fileno(), len(token) + 1, 0) == token
        printed, reason = _read(output), _read(errors).strip().rpartition("\n")[2]
    if not in_time:
        return f"timeout after {seconds:g} s"
    if not finished:
        return reason or "the code ended the process"
    if "output" in test and _lines(printed) != _lines(test["output"]):
        return f"expected the output {test['output'].strip()[:100]!r}, found {printed.strip()[:100]!r}"
    return None


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT).decode("utf-8", "replace")


def _wait(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return True if the child ends in time. Kills the child and its own children in any case."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    in_time = child.returncode is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return in_time


def run_in_child(channel: int) -> NoReturn:
    """Run the code and its test, write the token if nothing failed, and end this process."""
    with os.fdopen(os.dup(channel), "rb") as file:
        request = json.load(file)
    os.ftruncate(channel, 0)
    os.set_inheritable(channel, False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE, _MAX_FILE))
    token, is_program = bytes.fromhex(request["token"]), request["test"] is None
    module = types.ModuleType("__main__" if is_program else "reply")
    sys.modules[module.__name__] = module
    try:
        _run(request["code"], "reply.py", module)
        if not is_program:
            _run(request["test"], "test.py", module)
        sys.stdout.flush()
        os.pwrite(channel, token, 0)
    except SystemExit as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        if error.code in (None, 0) and is_program:  # a program may call exit()
            os.pwrite(channel, token, 0)
        else:
            _report(f"SystemExit: {error.code}")
    except BaseException as error:
        _report("".join(traceback.format_exception_only(error)))
    os._exit(0)


def _run(code: str, name: str, module: types.ModuleType) -> Any:
    exec(compile(code, name, "exec"), module.__dict__)  # noqa: S102  confined, in a separate process


def _report(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        os.write(2, f"\n{text}".encode("utf-8", "replace"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


if __name__ == "__main__":
    if sys.argv[1] == "--test":
        run_in_child(int(sys.argv[2]))
    main(sys.argv[1])
