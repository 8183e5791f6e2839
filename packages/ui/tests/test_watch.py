"""`rl watch`, driven as by a person's keys."""

import asyncio
import json
import os
import sys
import tempfile
import threading

import pytest

from buckeye.base.process import ChildProcess
from buckeye.runs.status import run_status
from buckeye_ui.sources import OpenRun
from tests.command import run_here
from tests.run.made_runs import made_run, write_metrics
from tests.waiting import HANG

HOSTILE = "[bold]not bold[/] [@click=app.quit]quit[/] \x1b[31mred\u202e <b>"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = made_run(tmp_path / "made")
    for step in range(2):
        write_metrics(run, ("orchestrator", step, step, {"reward/mean": 0.25 + step / 2}))
        write_metrics(run, ("trainer", step, step + 0.5, {"loss": 0.5 - step}))
        lines = [
            {
                "group": step,
                "task_id": HOSTILE,
                "env": "e",
                "reward": n / 2,
                "stop_reason": "answered",
                "text": [f"{HOSTILE} said at {step} by {n} " + "x" * 100_000 * n],
            }
            for n in range(2)
        ]
        (run / "rollouts").mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "rollouts" / f"step_{step}.jsonl").write_text(text)
    return run


def driven(run, body):
    pytest.importorskip("textual")
    from buckeye_ui import watch

    watch.findings_of = lambda _: {
        "findings": [{"name": "stalled", "confidence": "sure", "seen": HOSTILE, "cause": "c", "advice": "a"}]
    }

    async def drive():
        app = watch.Watch(OpenRun("made", run))
        async with app.run_test(size=(100, 30)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await body(app, pilot)

    asyncio.run(drive())


def shown(app, selector):
    return str(app.query_one(selector).render())


def test_what_is_seen_and_which_keys_show_it(run, monkeypatch):
    monkeypatch.setattr("buckeye_ui.findings.findings_of", lambda _: {})

    async def body(app, pilot):
        assert "stopped, step 2 of 20" in shown(app, "#state")
        assert "reward 0.5000" in shown(app, "#state")
        assert "stalled (sure): [bold]not bold[/]" in shown(app, "#found")
        assert shown(app, "#name0") == "reward: 0.25 at first, 0.75 at last"
        assert list(app.query_one("#curve1").data) == [0.5, -0.5]
        await pilot.press("4", "down", "enter")
        assert app.query_one("DataTable").size.height > 5
        await pilot.pause()
        said = shown(app, "#said")
        assert "said at 1 by 1" in said
        assert "characters are left out here" in said
        assert "\\x1b[31mred\\u202e" in said
        assert len(said) < 10_000
        await pilot.press("left_square_bracket")
        await app.workers.wait_for_complete()
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert "said at 0 by" in shown(app, "#said")
        assert app.sub_title == "rollouts of step 0"
        await pilot.press("q")

    driven(run, body)


def test_outside_of_a_terminal_it_says_what_serves(run):
    pytest.importorskip("textual")
    done = run_here("rl", "watch", run, cwd=run.parent)
    assert done.returncode == 2
    assert "`rl watch` needs a terminal" in done.stderr


@pytest.mark.parametrize(("keys", "code"), [(("ctrl+c",), 3), (("q",), 0)])
def test_beside_a_run_ctrl_c_ends_that_and_q_the_watching_alone(run, keys, code):
    pytest.importorskip("textual")
    from buckeye_ui import beside

    stops = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(3))"
    argv = [sys.executable, "-c", f"{stops}; print('on', flush=True); time.sleep({HANG})"]

    async def drive(child):
        app = beside.WatchBeside(OpenRun("made", run), child)
        async with app.run_test() as pilot:
            assert os.read(printed, 3) == b"on\n"
            await pilot.press(*keys)
            if code:
                child.wait(HANG)
            while app.is_running and app._exit is False:
                await pilot.pause(0.05)

    printed, prints = os.pipe()
    child = ChildProcess(argv, stdout=prints, guarded=True)
    asyncio.run(drive(child))
    assert child.returncode == (code or None)
    child.end(0.0, session=True)


def test_what_the_run_prints_after_the_watching_is_shown_whole(capsys):
    pytest.importorskip("textual")
    from buckeye_ui import beside

    says = "import time\nfor n in range(200): print(f'line {n}', flush=True); time.sleep(0.005)"
    with tempfile.TemporaryFile() as printed:
        child = ChildProcess([sys.executable, "-c", says], stdout=printed, stderr=printed, guarded=True)
        assert beside._followed(child, printed) == 0
    assert capsys.readouterr().out == "".join(f"line {n}\n" for n in range(200))


@pytest.mark.parametrize("more", [(), ("--provider", "ssh", "--host", "h")])
def test_watch_beside_needs_a_terminal_and_this_machine(tmp_path, more):
    done = run_here("rl", "--watch", "@", "none.toml", *more, cwd=tmp_path)
    assert done.returncode == 2
    assert "--watch needs a terminal" in done.stderr


def test_a_look_that_takes_longer_than_the_pause_to_the_next_is_waited_for(run, monkeypatch):
    pytest.importorskip("textual")
    from buckeye_ui import watch

    begun, go_on = [], threading.Event()

    def slow_status(*arguments, **options):
        begun.append(arguments)
        assert go_on.wait(HANG)
        return run_status(*arguments, **options)

    monkeypatch.setattr(watch, "run_status", slow_status)
    monkeypatch.setattr(watch, "_SECONDS", 0.05)

    async def body():
        app = watch.Watch(OpenRun("made", run))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause(1.0)
            go_on.set()
            assert len(begun) == 1
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "stopped, step 2 of 20" in shown(app, "#state")

    asyncio.run(body())
