"""A real ssh server on a host of a test."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from packages.machines.tests.sshd import SOFTWARE, make_key

from tests.cluster.hosts import Host, wait_until

PORT = 2222
_PROGRAM = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


def serve(host: Host, folder: Path, *, home: Path, key: Path) -> None:
    """Serve on the host until it is killed; `home` is the home directory there."""
    folder.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    host_key = folder / "host_key"
    if not host_key.exists():
        make_key(host_key)
    variables = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        "HOME": home,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "BUCKEYE_HOME": SOFTWARE,
        "HF_HUB_OFFLINE": "1",
    }
    config = folder / "sshd_config"
    config.write_text(
        f"Port {PORT}\nListenAddress {host.address}\nHostKey {host_key}\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {key}.pub\nStrictModes no\nPermitRootLogin yes\nUsePAM no\n"
        "PasswordAuthentication no\nUseDNS no\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    host.start(_PROGRAM, "-D", "-e", "-f", config, out=folder / "log", env=os.environ, cwd=folder)
    wait_until(lambda: _answers(host), 60, f"sshd of {host.name} answers")


def _answers(host: Host) -> bool:
    script = f"exec 3<>/dev/tcp/{host.address}/{PORT}"
    done = subprocess.run(host.argv("bash", "-c", script), capture_output=True, timeout=30, check=False)
    return done.returncode == 0
