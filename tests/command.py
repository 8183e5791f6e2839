"""Run Buckeye commands in the test process, without starting a new one."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
from unittest import mock

from huggingface_hub import constants

from buckeye.cli.main import main, rl

_PROGRAMS = {"buckeye": main, "rl": rl}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_here(*words, cwd, env=None, program="buckeye"):
    """Run `buckeye ARGUMENTS`, or `rl ARGUMENTS`, in `cwd` with the variables `env` (default: these).

    Return exit code, standard output and standard error. Changes that the command makes to this process are
    reverted, except imports.
    """
    argv = [program, *map(str, words)]
    variables = dict(os.environ if env is None else env)
    offline = variables.get("HF_HUB_OFFLINE") == "1"  # the library reads it at import
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", list(argv)),
        mock.patch.object(sys, "stdin", io.StringIO()),
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(constants, "HF_HUB_OFFLINE", offline),
        _signals_and_logging_kept(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            _PROGRAMS[program]()
            code = 0
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _signals_and_logging_kept():
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    root = logging.getLogger()
    loggers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        root.handlers[:], root.level = loggers, level
