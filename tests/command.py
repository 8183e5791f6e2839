"""Run Buckeye commands in the test process, without starting a new one, and check the keys of their JSON."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from unittest import mock

from huggingface_hub import constants

from buckeye.cli.main import main, rl
from buckeye.cli.tree import find_command
from tests.places import ROOT

_PROGRAMS = {"buckeye": main, "rl": rl}
_JSON = tomllib.loads((ROOT / "tools" / "reference.toml").read_text(encoding="utf-8"))["json"]
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
    check_json(["rl", *argv[1:]] if program == "rl" else argv[1:], out.getvalue())
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def check_json(words, out):
    """Assert that JSON which `buckeye WORDS` printed has exactly the keys in tools/reference.toml."""
    command, args = find_command(words)
    if "--json" not in args or command not in _JSON:
        return
    text = _JSON[command]
    if other := re.search(r"objects? of `([a-z ]+)`", text):
        text = _JSON[other[1]]
    forms = text.split("; ")
    flags = {form: set(re.findall(r"`(--\w+)`", form)) for form in forms}
    forms = [form for form in forms if flags[form] & set(args)] or [form for form in forms if not flags[form]]
    for line in out.splitlines():
        if line.startswith(("{", "[")):
            value = json.loads(line)
            for item in value if isinstance(value, list) else [value]:
                assert any(_has_keys(item, form) for form in forms), (command, list(item), forms)


def _has_keys(item, form):
    keys = form.partition("sometimes ")[0]
    required, possible = (re.findall(r"`([\w@]+)`(?: \(([^()]*)\))?", text) for text in (keys, form))
    found = {re.sub(r"@\d+$", "@k", key) for key in item}
    is_open = not required or "fields of" in form
    has_keys = dict(required).keys() <= found and (is_open or found <= dict(possible).keys())
    return has_keys and all(_fits(item.get(name), inner) for name, inner in required if inner)


def _fits(value, inner):
    """Return True if a value has the keys in parentheses, or is one of the values there."""
    names = set(re.findall(r"`(\w+)`", inner))
    if not names:
        return True
    values = value if isinstance(value, list) else [value]
    return all(v is None or (v in names if isinstance(v, str) else v.keys() == names) for v in values)


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
