"""End of an unattended machine when its disk is full."""

import json
import os
import subprocess
import sys

from tests.local_server import LocalServer, QuietHandler
from tests.waiting import HANG


def test_full_disk_does_not_keep_a_rented_machine_alive(tmp_path):
    ended = []

    class Provider(QuietHandler):
        def do_DELETE(self):
            ended.append(self.path)
            self.answer(200, b"")

    with LocalServer(Provider) as provider:
        machine = {"url": f"{provider.url}/pods/1"}
        dead_man = {"seconds": 0.0, "expires": None, "grace": 1.0, "machine": machine}
        (tmp_path / "job.json").write_text(json.dumps({"dead_man": dead_man}))
        (tmp_path / "heartbeat").touch()
        (tmp_path / "dead_man").mkdir()  # cannot be written, as on a full disk
        with open("/dev/full", "w") as full:
            subprocess.run(
                [sys.executable, "-m", "buckeye.remote.pod.watchdog", str(tmp_path)],
                env={**os.environ, "BUCKEYE_POD_KEY": "key"},
                stdout=full,
                timeout=HANG,
                check=False,
            )
    assert ended == ["/pods/1"]
