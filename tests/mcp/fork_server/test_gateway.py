"""Sessions of a gateway, forked inside its sandbox."""

import os
import shutil
import sys

import pytest
from tests.mcp.environment.leaks import assert_none_left
from tests.mcp.gateway.client import SERVER, Client, gateway

from buckeye.base.process_guard import MARK_VARIABLE


@pytest.mark.parametrize("way", ["--preload", pytest.param("--no-preload", marks=pytest.mark.slow)])
def test_gateway_forks_sessions_unless_disabled(tmp_path, way):
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(SERVER, folder / "scripted_server.py")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    script = python.with_name("scripted")
    server = str(folder / "scripted_server.py")
    script.write_text(f"#!{python}\nimport runpy\nrunpy.run_path({server!r}, run_name='__main__')\n")
    script.chmod(0o755)
    with gateway(folder, "--command", str(script), way) as running:
        seen = []

        def play(secret):
            client = Client(running.url, **{"Env-Secret": secret}).open()
            seen.append(client.call("environment"))
            client.close()
            return running.status()["forked"] > 0

        play("one")
        if way == "--preload":
            running.until(lambda: play("two"), "no session is forked")
        else:
            play("two")
        seen = [seen[0], seen[-1]]
        assert [environment["SECRET"] for environment in seen] == ["one", "two"]
        at_start = {"PWD", "LC_CTYPE"}  # bubblewrap and the interpreter set them
        assert seen[0].keys() - at_start == seen[1].keys() - at_start
        own = {name for name in seen[1] if name.startswith("XDG_")} | {"HOME", "TMPDIR"}
        set_anew = {
            *own,
            "PATH",
            "PWD",
            "LANG",
            "LC_ALL",
            "TZ",
            "UV_CACHE_DIR",
            "npm_config_cache",
            MARK_VARIABLE,
        }
        assert not seen[1].keys() & (os.environ.keys() - set_anew)
        assert all(seen[0][name] != seen[1][name] for name in own)
        running.until(lambda: running.status()["running"] == 0, "a session still runs")
        assert (running.status()["forked"] > 0) == (way == "--preload")
    assert_none_left(str(folder))
