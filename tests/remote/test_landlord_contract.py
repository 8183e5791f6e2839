"""The landlord of the tests is one that the real `prime` program can rent from."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.remote.landlord import KEY, Landlord, serve
from tests.remote.venvs import venv_with

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs():
    return venv_with("prime-0.18", "prime==0.18.0")


def test_the_real_program_sees_rents_and_ends_a_pod(programs, tmp_path):
    landlord = Landlord(active_after=0, ready_after=0)
    landlord.redirects = True  # as the service does with addresses that lack the last slash
    with serve(landlord) as url:

        def prime(*words, key=KEY):
            environment = {
                **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
                "HOME": str(tmp_path),
                "PRIME_API_BASE_URL": url,
                "PRIME_API_KEY": key,
                "PRIME_DISABLE_VERSION_CHECK": "1",
                "COLUMNS": "250",
            }
            return subprocess.run(
                [programs / "prime", *words],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )

        listed = prime(
            "availability", "list", "--gpu-type", "A100_80GB", "--gpu-count", "2", "--output", "json"
        )
        assert listed.returncode == 0, listed.stderr + listed.stdout
        offers = json.loads(listed.stdout)["gpu_resources"]
        assert sorted(offer["provider"] for offer in offers) == ["datacrunch", "hyperstack", "runpod"]
        chosen = next(offer for offer in offers if offer["provider"] == "datacrunch")
        made = prime(
            *("pods", "create", "--id", chosen["id"], "--name", "by-the-program", "--disk-size", "100"),
            *("--image", "cuda_12_6_pytorch_2_7", "--yes"),
        )
        assert made.returncode == 0, made.stderr + made.stdout
        (pod,) = landlord.alive
        assert (pod["name"], pod["_cloud"]) == ("by-the-program", "2A100.cheap")
        shown = prime("pods", "status", pod["id"], "--output", "json")
        assert shown.returncode == 0, shown.stderr + shown.stdout
        assert "root@127.0.0.1 -p 2222" in shown.stdout
        assert pod["id"] in prime("pods", "list", "--output", "json").stdout
        ended = prime("pods", "terminate", pod["id"], "--yes")
        assert ended.returncode == 0, ended.stderr + ended.stdout
        assert landlord.alive == []
        refused = prime("pods", "list", key="pit_wrong")
        assert refused.returncode != 0
