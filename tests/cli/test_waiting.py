"""Commands that take long report their progress."""

import io
import sys
import threading
from types import SimpleNamespace

from buckeye.base import terminal


def test_status_line_without_terminal_prints_a_long_wait_once(monkeypatch):
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


def test_status_line_without_terminal_prints_nothing_for_a_short_wait(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(terminal, "FIRST_LINE", 3600.0)
    with terminal.status_line("reading") as show:
        show("playing")
    assert sys.stderr.getvalue() == ""
