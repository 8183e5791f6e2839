"""`buckeye env build` and `env push` with real programs: buildah and Debian's registry."""

import base64
import json
import os
import subprocess
import sys

import httpx
import pytest
import yaml
from tests.command import check_json
from tests.mcp.images.local_registry import (
    builder_environment,
    needs_registry,
    python_dockerfile,
    python_tree,
    registry,
)

from buckeye.mcp.tasks.lock_file import read_lock

pytestmark = [pytest.mark.slow, needs_registry]


HASH = "$2b$04$cXSI42LnDJkrRDl6IEqKmuZOegy2.x2bwQapETF6Fc0CL4YgNPgWO"  # bcrypt of planted-password


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("text_2048")
    python_tree(place / "tree")
    python_dockerfile(place, "text_2048")
    return place


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def buckeye(folder, home):
    variables = builder_environment(home / "buildah")

    def run(*words):
        env = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
        argv = [sys.executable, "-m", "buckeye", *words]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
        check_json(words, done.stdout)
        return done

    return run


def test_build_and_push(buckeye, folder, tmp_path):
    lock = folder / "buckeye.lock.yaml"
    dataset = "primary_dataset: {name: a/b, task_count: 1, updated_at: 2026-01-01}\n"
    lock.write_text(f"# ours\nimage: my-env:latest  # the name\n{dataset}")
    done = buckeye("env", "build", ".", "--builder", "buildah", "--json")
    assert done.returncode == 0, done.stderr
    assert "move" in done.stdout
    found = read_lock(lock)
    assert found.image == "my-env:latest"
    assert found.digest.startswith("sha256:")
    assert {tool.name for tool in found.tools} == {"setup", "move", "evaluate"}
    assert found.start_seconds > 0
    assert found.primary_dataset.name == "a/b"
    assert "# ours" in lock.read_text()
    assert "# the name" in lock.read_text()
    assert yaml.safe_load(lock.read_text())["version"] == 1

    refused = buckeye("env", "push")
    assert refused.returncode == 2
    assert "ghcr.io/my-org/my-env:latest" in refused.stderr

    with registry(tmp_path / "registry") as host:
        done = buckeye("env", "push", ".", "--image", f"{host}/my-org/my-env:1")
        assert done.returncode == 0, done.stderr
        pushed = read_lock(lock)
        assert (pushed.image, pushed.digest) == (f"{host}/my-org/my-env:1", found.digest)
        assert pushed.pushed_at
        accept = {"accept": "application/vnd.oci.image.manifest.v1+json"}
        answer = httpx.get(f"http://{host}/v2/my-org/my-env/manifests/1", headers=accept)
        assert answer.headers["docker-content-digest"] == found.digest
        again = buckeye("env", "push", "--json")
        assert json.loads(again.stdout) == {"image": pushed.image, "digest": found.digest}


def test_push_uses_stored_login(buckeye, folder, home, tmp_path):
    (tmp_path / "htpasswd").write_text(f"me:{HASH}\n")
    auth = {"htpasswd": {"realm": "r", "path": str(tmp_path / "htpasswd")}}
    with registry(tmp_path / "registry", auth=auth) as host:
        (folder / "buckeye.lock.yaml").write_text("image: my-env:latest\n")
        assert buckeye("env", "build", "--builder", "buildah", "--quiet").stdout == ""
        refused = buckeye("env", "push", "--image", f"{host}/o/e:1")
        assert refused.returncode == 1
        assert f"docker login {host}" in refused.stderr
        (home / ".docker").mkdir()
        entry = base64.b64encode(b"me:planted-password").decode()
        (home / ".docker" / "config.json").write_text(json.dumps({"auths": {host: {"auth": entry}}}))
        done = buckeye("env", "push", "--image", f"{host}/o/e:1")
        assert done.returncode == 0, done.stderr
        assert "planted" not in done.stdout + done.stderr + (folder / "buckeye.lock.yaml").read_text()
