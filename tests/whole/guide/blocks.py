"""Commands and files of the guide, and a workspace to run them.

Only these parts are changed: placeholders and absolute paths; the model (a local tiny one); sizes and steps.
Programs that need another machine (ssh, curl, uv's downloads, nvidia-smi) are replaced by scripts that record
their calls.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.places import ROOT
from tests.ports import free_port
from tests.waiting import HANG

GUIDE = Path(__file__).with_name("guide.md")
STAND_INS = {
    "uv": 'case "$1" in run|$REAL_UV) exec "$UV" "$@";; esac; echo "uv $*" >> "$CALLS"',
    "ssh": 'echo "ssh $*" >> "$CALLS"',
    "curl": 'echo "curl $*" >> "$CALLS"; echo true',
    "prime": 'echo "prime $*" >> "$CALLS"',
    "nvidia-smi": 'echo "nvidia-smi $*" >> "$CALLS"; exit 9',
    "watch": 'while [ "$1" = "-n" ]; do shift 2; done; exec sh -c "$*"',
}


def blocks(language):
    """Return the fenced blocks of one language in the order of the guide, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", GUIDE.read_text(encoding="utf-8"), re.S | re.M)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) for indent, text in found]


class Workspace:
    """Replacement for the guide's machine."""

    def __init__(self, root, model):
        self.root = root
        self.model = str(model)
        self.replacements = {
            "/workspace/prime-rl": str(root),
            "/tmp/monitor_disk.sh": str(root / "monitor_disk.sh"),
            "<INSTANCE_IP>": "127.0.0.1",
            "<PORT>": "22",
            "Qwen/Qwen3-0.6B": str(model),
            "max_steps = 1000": "max_steps = 3",
            "batch_size = 128": "batch_size = 8",
            "rollouts_per_example = 16": "rollouts_per_example = 4",
            "seq_len = 2048": "seq_len = 192",
            "max_tokens = 2048": "max_tokens = 8",
            "interval 10": "interval 1",
            "interval = 10": "interval = 1",
            "resume-step 500": "resume-step 2",
        }
        local_bin = root / "home" / ".local" / "bin"
        local_bin.mkdir(parents=True)
        for name, script in STAND_INS.items():
            path = local_bin / name
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(0o755)
        venv_bin = Path(sys.executable).parent
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PRIME_", "BUCKEYE_", "COLUMNS"))},
            "HOME": str(root / "home"),
            "PATH": f"{local_bin}:{venv_bin}:{os.environ['PATH']}",
            "CALLS": str(root / "calls.log"),
            "UV": str(venv_bin / "uv"),
            "REAL_UV": "",
            "UV_PROJECT": str(ROOT),
            "UV_PROJECT_ENVIRONMENT": str(venv_bin.parent),
            "UV_NO_SYNC": "1",  # the packages are installed already
            "HF_HUB_OFFLINE": "1",
            "TERM": "dumb",
        }

    def text(self, block):
        """Return the block with the replacements of this workspace."""
        for old, new in self.replacements.items():
            block = block.replace(old, new)
        return block

    def run(self, block, *, limit=HANG, expect=0, **variables):
        """Run a bash block and return its output; `expect=None` accepts any exit code."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", self.text(block)],
            cwd=self.root,
            env={**self.env, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
        assert expect is None or done.returncode == expect, f"exit code {done.returncode}:\n{done.stdout}"
        return done.stdout

    def start_server(self):
        """Start a server process of Buckeye, wait until it is ready, and keep it running."""
        port = free_port()
        file = self.root / "inference.toml"  # the file of a run's server has this name
        file.write_text(f"model.name = {json.dumps(self.model)}\nserver.port = {port}\n")
        words = ("-m", "buckeye", "serve", "@", file.name)
        output = self.root / "server.stdout"
        server = subprocess.Popen(
            [sys.executable, *words], cwd=self.root, env=self.env, stdout=output.open("w")
        )
        deadline = time.monotonic() + HANG
        while "server ready" not in output.read_text():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return server

    def calls(self):
        return (self.root / "calls.log").read_text()

    def set_steps(self, steps):
        """Let later blocks of the guide train up to another step."""
        for name in ("train", "orch"):
            path = self.root / "configs" / "dakota_grammar_gym" / "rl" / f"{name}.toml"
            path.write_text(re.sub(r"max_steps = \d+", f"max_steps = {steps}", path.read_text()))
