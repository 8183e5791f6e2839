"""Choice of the key that opens a pod."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from buckeye.errors import UsageError
from buckeye.remote.connection import find_private_key, public_key

needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen (OpenSSH)")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_key_that_is_asked_for_goes_first(home):
    for name in ("asked", "account", ".ssh/prime_key.pem"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("")
        (home / name).chmod(0o600)
    assert find_private_key(home / "asked", home / "account", home) == home / "asked"
    assert find_private_key(None, home / "account", home) == home / "account"
    assert find_private_key(None, None, home) == home / ".ssh" / "prime_key.pem"


@pytest.mark.parametrize("arguments", [("asked", None), (None, "account")])
def test_a_key_that_is_named_and_not_there(home, arguments, refusal):
    asked, account = (home / name if name else None for name in arguments)
    with refusal(UsageError):
        find_private_key(asked, account, home)


def test_without_any_key_one_is_made_once_for_this_user_only(home):
    path = find_private_key(None, None, home / "buckeye")
    assert path == home / "buckeye" / "ssh" / "id_ed25519"
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    content = path.read_bytes()
    assert find_private_key(None, None, home / "buckeye").read_bytes() == content
    kept = public_key(path)
    path.with_name("id_ed25519.pub").unlink()
    derived = public_key(path)
    assert kept is not None
    assert derived is not None
    assert kept.split()[:2] == derived.split()[:2]
    assert kept.startswith("ssh-ed25519 ")


@needs_openssh
def test_a_key_under_a_passphrase_has_no_public_one_without_its_file(home):
    path = home / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", path], check=True)
    path.with_name("locked.pub").unlink()
    assert public_key(path) is None
