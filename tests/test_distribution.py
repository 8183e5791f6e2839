"""The command that installs more of Buckeye matches its source and the installer that was used."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from buckeye.base.distribution import DISTRIBUTION, install_command

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("origin", "what"),
    [
        (None, "'buckeye-rl[mcp,hub]'"),
        ({"url": "file:///my%20code/b", "dir_info": {"editable": True}}, "-e '/my code/b[mcp,hub]'"),
        ({"url": "file:///code/b", "dir_info": {}}, "'/code/b[mcp,hub]'"),
        ({"url": "file:///w/b.whl", "archive_info": {}}, "'buckeye-rl[mcp,hub] @ file:///w/b.whl'"),
        (
            {"url": "https://host/b", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            "'buckeye-rl[mcp,hub] @ git+https://host/b@0a1b'",
        ),
    ],
)
def test_install_command_uses_the_source_of_the_installation(tmp_path, monkeypatch, origin, what):
    info = tmp_path / "buckeye_rl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: buckeye-rl\nVersion: 0.1.0\n")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.distribution(DISTRIBUTION).metadata["Name"] == DISTRIBUTION
    assert install_command("mcp", "hub").endswith(f" install {what}")


def test_install_command_uses_the_installer_of_this_interpreter(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "")
    assert install_command("hub").startswith(f"{python} -m pip install ")
    monkeypatch.setenv("PATH", str(pip.parent))
    assert install_command("hub").startswith("pip install ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert install_command("hub").startswith(f"uv pip install --python {python} ")


def test_lock_uses_only_the_public_index():
    addresses = re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text())
    assert set(addresses) == {"pypi.org", "files.pythonhosted.org"}


def test_the_first_screen_of_the_readme_has_both_commands():
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24]
    assert {line.split("  ")[0] for line in screen} >= {"make demo", "make test"}
