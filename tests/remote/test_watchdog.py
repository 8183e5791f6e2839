"""End of an unattended machine with a full disk or a wrong clock."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from buckeye.remote.pod.watchdog import watch
from tests.local_server import LocalServer, QuietHandler


def end_of(job, output):
    """Run the watchdog of an unattended job, and return the requests to the provider."""
    ended = []

    class Provider(QuietHandler):
        def do_DELETE(self):
            ended.append(self.path)
            self.answer(200, b"")

    with LocalServer(Provider) as provider:
        machine = {"url": f"{provider.url}/pods/1"}
        dead_man = {"seconds": 0.0, "expires": None, "grace": 1.0, "machine": machine}
        (job / "job.json").write_text(json.dumps({"dead_man": dead_man}))
        with open(output, "w") as log, suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "buckeye.remote.pod.watchdog", str(job)],
                env={**os.environ, "BUCKEYE_POD_KEY": "key"},
                stdout=log,
                timeout=60,
                check=False,
            )
    return ended


def test_full_disk_does_not_keep_a_rented_machine_alive(tmp_path):
    (tmp_path / "heartbeat").touch()
    (tmp_path / "dead_man").mkdir()  # cannot be written, as on a full disk
    assert end_of(tmp_path, "/dev/full") == ["/pods/1"]


@pytest.mark.parametrize("heartbeat", ["of a clock that was set back", None])
def test_wrong_heartbeat_does_not_keep_a_rented_machine_alive(tmp_path, heartbeat):
    if heartbeat is not None:
        (tmp_path / "heartbeat").touch()
        os.utime(tmp_path / "heartbeat", (time.time() + 3600, time.time() + 3600))
    assert end_of(tmp_path, "/dev/null") == ["/pods/1"]


def test_clock_that_is_set_forward_does_not_end_a_machine(tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text(
        json.dumps({"dead_man": {"seconds": 60.0, "expires": None, "grace": 0.0, "machine": None}})
    )
    (tmp_path / "heartbeat").touch()
    now = time.time

    def pause(seconds):
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        (tmp_path / "rc").touch()  # ends the watchdog of a host of the user

    monkeypatch.setattr(time, "sleep", pause)
    watch(tmp_path)
    assert not (tmp_path / "dead_man").exists()
