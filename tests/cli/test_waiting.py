"""Something that takes long says what it is doing."""

import io
import sys
import threading
import time
from types import SimpleNamespace

from buckeye.base import terminal


def test_without_a_terminal_plain_lines_say_what_is_being_done(monkeypatch):
    monkeypatch.setattr(terminal, "FIRST_LINE", 0.001)
    monkeypatch.setattr(terminal, "RAREST_LINE", 0.001)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with terminal.status_line("reading") as show:
        _until("reading ...\n")
        show("playing")
        _until("playing ...\n")
    assert set(sys.stderr.getvalue().splitlines()) == {"reading ...", "playing ..."}


def test_what_takes_long_is_said_once(monkeypatch):
    pauses = []

    class Over(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return len(pauses) > 5

    monkeypatch.setattr(terminal, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with terminal.status_line("reading"):
        pass
    assert sys.stderr.getvalue() == "reading ...\n"
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_what_is_soon_over_says_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(terminal, "FIRST_LINE", 3600.0)
    with terminal.status_line("reading") as show:
        show("playing")
    assert sys.stderr.getvalue() == ""


def _until(line):
    for _ in range(60_000):
        if line in sys.stderr.getvalue():
            return
        time.sleep(0.001)
    raise AssertionError(f"{line!r} was never shown")
