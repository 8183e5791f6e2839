"""Keys of a run cannot be read through the processes that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
from tests.mcp.gateway.client import gateway

from buckeye.base.process import is_secret

PLANTED = {
    name: f"planted-{number}"
    for number, name in enumerate(
        (
            "HF_TOKEN", "WANDB_API_KEY", "PRIME_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
            "OPENAI_API_KEY", "BUCKEYE_INFERENCE_KEY", "MY_PASSWORD", "SERVICE_CREDENTIALS", "GITHUB_PAT",
        )
    )
}  # fmt: skip

HOLDS = """
import os, sys, time
from buckeye.base.process import receive_secrets, forbid_tracing
receive_secrets()
{more}
assert os.environ["HF_TOKEN"] == "planted-0", os.environ.get("HF_TOKEN")
import ctypes
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
assert getenv(b"HF_TOKEN") == b"planted-0"  # what libraries in C see
child = __import__("subprocess").run(["env"], capture_output=True, text=True).stdout
assert "HF_TOKEN=planted-0" in child
print("ready", flush=True)
time.sleep(60)
"""


def holder(more="", **options):
    return subprocess.Popen(
        [sys.executable, "-c", HOLDS.format(more=more)],
        env={**os.environ, **PLANTED},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_what_a_shell_gave_is_not_in_the_process_table():
    with holder() as process:
        assert process.stdout.readline() == "ready\n"
        seen = psutil.Process(process.pid).environ()
        process.kill()
    assert seen["PATH"] == os.environ["PATH"]
    assert not {name for name, value in seen.items() if "planted" in value}


def test_the_memory_of_who_starts_code_of_others_is_not_read_by_the_same_user():
    """Root may trace all processes, so the script drops that capability, as a session of a gateway does."""
    look = (
        "import ctypes, os, struct, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.capset(struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0] * 6))\n"
        "for name in ('environ', 'mem', 'maps'):\n"
        "    try:\n"
        "        print(name, len(open(f'/proc/{sys.argv[1]}/{name}', 'rb').read(1)))\n"
        "    except OSError as error:\n"
        "        print(name, 'refused')\n"
    )
    with holder("forbid_tracing()") as process:
        assert process.stdout.readline() == "ready\n"
        done = subprocess.run(
            [sys.executable, "-c", look, str(process.pid)], capture_output=True, text=True, check=True
        )
        process.kill()
    assert done.stdout.splitlines() == ["environ refused", "mem refused", "maps refused"]


def test_a_process_of_a_run_gets_its_keys_by_a_pipe(tmp_path):
    from buckeye.launch.hosts import LocalProcess

    script = (
        "import os, sys, time\n"
        "before = open('/proc/self/environ').read()\n"
        "from buckeye.base.process import receive_secrets\n"
        "receive_secrets()\n"
        "print(json.dumps(['planted' in before, dict(os.environ)]) if (json := __import__('json')) else '')\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = LocalProcess([sys.executable, "-c", script], env={**os.environ, **PLANTED}, output=output)
    process.wait()
    os.close(process.heartbeats)
    in_block, given = json.loads(log.read_text())
    assert in_block is False
    assert {name: given[name] for name in PLANTED} == PLANTED
    assert "BUCKEYE_SECRETS_FD" not in given


def test_names_of_keys_are_known():
    others = ["PATH", "HOME", "KEYBOARD", "TOKENIZERS_PARALLELISM", "MONKEY", "SSH_AUTH_SOCK"]
    assert [name for name in [*PLANTED, *others] if is_secret(name)] == list(PLANTED)


def test_a_gateway_shows_no_key_in_any_process(tmp_path):
    keys = {**PLANTED, "BUCKEYE_API_KEY": "planted-key", "BUCKEYE_HOME": str(tmp_path)}
    with gateway(tmp_path, "--command", "cat", env=keys) as running:
        process = psutil.Process(running.process.pid)
        for member in [process, *process.children(recursive=True)]:
            running.until(lambda one=member: "planted" not in str(one.environ()), "keys are there")
