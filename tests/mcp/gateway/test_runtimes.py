"""Images behind the gateway, run by chroot and by container programs (replaced by scripts)."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mcp.gateway.client import SERVER, Client, gateway
from tests.mcp.images.oci import fake_registry, shell_image
from tests.places import ROOT

from buckeye.mcp.sandbox import process_runtimes
from buckeye.mcp.sandbox.confine_command import (
    SandboxSupport,
    build_confine_env,
    confine_argv,
    sandbox_support,
)
from buckeye.mcp.sandbox.container_runtimes import image_runtime
from buckeye.mcp.sandbox.process_runtimes import FolderRuntime
from buckeye.mcp.sandbox.runtime import RuntimeUnavailableError, SandboxLimits

pytestmark = pytest.mark.e2e

ROOT_ON_LINUX = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT_ON_LINUX, reason="needs root on Linux")


@needs_root
def test_chroot_runtime_runs_image_without_daemon(tmp_path, wording):
    with fake_registry() as registry, gateway(tmp_path, "--runtime", "chroot") as running:
        name = registry.add("org/env", shell_image(), tag="v1")
        outside = tmp_path / "outside"
        outside.touch()
        wish = {"Mcp-Image": name, "Env-Outside": str(outside)}
        one = Client(running.url, **wish, **{"Env-Secret": "of-one"}).open()
        other = Client(running.url, **wish, **{"Env-Secret": "of-other"}).open()
        assert one.call("write") == "done"
        assert one.call("read") == "of-one"
        assert other.call("read") == "nothing"
        assert other.call("outside") == "hidden"
        assert one.call("null") == "works"
        who = one.call("who")
        assert "uid=0" not in who
        assert "uid=231072" in who
        assert "cwd=/app image=from-the-image" in who
        assert who.endswith("processes=/proc/1 /proc/2")  # only its own
        one.close()
        other.close()
        again = Client(running.url, **wish).open()
        assert again.call("read") == "nothing"  # the image itself was not written to
        assert registry.asked.count("/v2/org/env/manifests/v1") == 1
        assert "of-one" not in running.log()
        missing = Client(running.url, **{"Mcp-Image": name.replace("env", "no-env")})
        assert missing.error(502) == wording
        assert Client(running.url).error(400) == wording
    assert not list((tmp_path / "cache" / "buckeye" / "gateway").glob("*/*"))
    mounts = Path("/proc/mounts").read_text()
    assert str(tmp_path) not in mounts


@needs_root
@pytest.mark.skipif(not sandbox_support().namespaces, reason="already without namespaces")
@pytest.mark.e2e
def test_chroot_runtime_runs_image_without_namespaces(tmp_path):
    # rented containers allow neither namespaces nor mounts: drop the capability
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    script = tmp_path / "run.py"
    script.write_text(NO_NAMESPACES)
    with fake_registry() as registry:
        name = registry.add("org/env", shell_image())
        words = [*without, sys.executable, str(script), name, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "whole"


NO_NAMESPACES = """
import sys
sys.path.insert(0, ".")
from pathlib import Path
from tests.mcp.gateway.client import Client, gateway
name, folder = sys.argv[1], Path(sys.argv[2])
with gateway(folder / "g", "--runtime", "chroot") as running:
    assert "process groups only" in running.log()
    one = Client(running.url, **{"Mcp-Image": name, "Env-Secret": "one"}).open()
    other = Client(running.url, **{"Mcp-Image": name, "Env-Outside": str(folder)}).open()
    assert one.call("write") == "done"
    assert one.call("read") == "one"
    assert other.call("read") == "nothing"
    assert other.call("outside") == "hidden"
    assert one.call("null") == "works"
    with gateway(folder / "h", "--runtime", "chroot") as second:
        apart = Client(second.url, **{"Mcp-Image": name, "Env-Secret": "apart"}).open()
        assert apart.call("write") == "done"
        one.close()
        roots = folder / "g" / "cache" / "buckeye" / "gateway"
        running.until(lambda: len(list(roots.glob("*/*/root"))) == 1, "it was not cleaned up")
        assert apart.call("read") == "apart"  # it is of another user than the one that was killed
    assert Client(running.url, **{"Mcp-Image": name}).open().call("read") == "nothing"
assert not list((folder / "g" / "cache" / "buckeye" / "gateway").glob("*/*"))
print("whole")
"""


@needs_root
def test_confine_applies_each_limit(wording):
    def behind(command, **given):
        argv = confine_argv(
            ["/bin/sh", "-c", command],
            sandbox_support=sandbox_support(),
            cwd=Path("/"),
            limits=SandboxLimits(**given),
        )
        env = build_confine_env({"PATH": os.environ["PATH"], "GIVEN": "x"})
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    assert behind("echo $GIVEN; exit 7").stdout == "x\n"
    assert behind("exit 7").returncode == 7
    assert behind("kill -9 $$; exit 5").returncode == 5  # process 1 of its PID namespace
    assert behind("ulimit -c").stdout.strip() == "0"
    assert behind("grep NoNewPrivs /proc/self/status").stdout.split() == ["NoNewPrivs:", "1"]
    if sandbox_support().namespaces:
        assert behind("echo /proc/[0-9]*").stdout.strip() == "/proc/1"
        assert behind("cat /proc/net/dev", network=False).stdout.count(":") == 1  # only lo
    taken = behind("head -c 300000000 /dev/zero | tail -c 300000000 | wc -c", memory=64 * 2**20)
    assert taken.stdout.strip() != "300000000"
    missing = confine_argv(
        ["no-such-program"], sandbox_support=sandbox_support(), cwd=Path("/"), limits=SandboxLimits()
    )
    done = subprocess.run(missing, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert done.stderr == wording


@needs_root
@pytest.mark.skipif(not Path("/usr/bin/perl").exists(), reason="perl is a program that can call chroot")
def test_root_of_user_namespace_cannot_leave_image():
    def as_normal_user(program):
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-B", "-c"]
        return subprocess.run([*words, program], cwd=ROOT, capture_output=True, text=True, check=False)

    if as_normal_user('import sys; sys.path.insert(0, "src"); import buckeye.mcp.sandbox').returncode:
        pytest.skip("other users cannot read this checkout")
    done = as_normal_user(NORMAL_USER)
    if "cannot" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["inside", "0000000000000000"]


NORMAL_USER = """
import subprocess, sys, tempfile
from pathlib import Path
sys.path.insert(0, "src")
from buckeye.mcp.sandbox.runtime import SandboxLimits
from buckeye.mcp.sandbox.confine_command import RootFilesystem, confine_argv, sandbox_support

LEAVE = '''
opendir(my $top, "/");
mkdir("/below");
if (chroot("/below")) {
    chdir($top);
    chdir("..") for 1..40;
    chroot(".");
}
print(-e "/of-the-image" ? "inside\\n" : "outside\\n");
chdir($top);
open(my $status, "proc/self/status");
print grep { s/CapEff:// } <$status>;
'''
if not sandbox_support().overlay:
    sys.exit(print("users cannot make namespaces here:", sandbox_support().reason))
with tempfile.TemporaryDirectory() as folder:
    root, upper, work = (Path(folder, name) for name in ("root", "upper", "work"))
    for path in (root, upper, work, upper / "dev", upper / "proc"):
        path.mkdir()
    (upper / "of-the-image").touch()
    where = RootFilesystem(path=root, layers=(Path("/usr"), upper, work), user=None, cwd="/")
    support, limits = sandbox_support(), SandboxLimits()
    argv = confine_argv(["/bin/perl", "-e", LEAVE], limits=limits, sandbox_support=support, root=where)
    done = subprocess.run(argv, env={}, timeout=60)
    (work / "work").chmod(0o700)
sys.exit(done.returncode)
"""


def test_confine_without_namespaces_runs_command(tmp_path):
    nothing = SandboxSupport(namespaces=False, overlay=False, reason="a test")
    argv = confine_argv(
        ["/bin/sh", "-c", "pwd; exit 3"], sandbox_support=nothing, cwd=tmp_path, limits=SandboxLimits()
    )
    done = subprocess.run(argv, env=build_confine_env({}), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, f"{tmp_path}\n")


FAKE = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

home = Path({home!r})
words = sys.argv[1:]
with (home / "calls").open("a") as calls:
    calls.write(json.dumps({{"words": words, "env": dict(os.environ)}}) + "\\n")
if words[0] == "version" and (home / "down").exists():
    sys.exit("Cannot connect to the Docker daemon")
if words[:2] == ["image", "inspect"]:
    sys.exit(0 if (home / words[2].replace("/", "_")).exists() else 1)
if words[0] == "pull":
    if "no-such" in " ".join(words):
        sys.exit("manifest unknown")
    (home / words[-1].replace("/", "_")).touch()
    if words[1] == "--force":
        Path(words[2]).touch()
if words[0] == "ps":
    print("abc123 1-dead")
if words[0] == "run":
    for word in sys.argv[1:]:
        if word.startswith("--cidfile="):
            Path(word.partition("=")[2]).write_text("c0ffee")
    os.execv(sys.executable, [sys.executable, {server!r}])
"""


def fake_program(folder, name):
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text(FAKE.format(python=sys.executable, home=str(home), server=str(SERVER)))
    program.chmod(0o755)
    return home, {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def calls(home):
    return [json.loads(line) for line in (home / "calls").read_text().splitlines()]


@pytest.mark.parametrize("name", ["docker", pytest.param("podman", marks=pytest.mark.slow)])
@pytest.mark.e2e
def test_container_runtime_starts_container_per_session(tmp_path, name):
    home, env = fake_program(tmp_path, name)
    words = ["--runtime", name, "--memory", "2g", "--cpus", "1.5", "--no-network"]
    with gateway(tmp_path, *words, env=env) as running:
        wish = {"Mcp-Image": "org/env:1", "Env-Secret": "hush-hush"}
        clients = [Client(running.url, **wish).open() for _ in range(2)]
        assert clients[0].call("environment")["SECRET"] == "hush-hush"
        assert "WANDB_API_KEY" not in clients[0].call("environment")
        clients[0].close()
        running.until(lambda: ["rm", "--force", "c0ffee"] in [c["words"] for c in calls(home)], "no rm")
        assert "manifest unknown" in Client(running.url, **{"Mcp-Image": "no-such/env"}).error(502)
        refused = Client(running.url, **{"Mcp-Image": "org/env:1", "Env-Docker-Host": "tcp://evil"})
        assert "DOCKER_HOST" in refused.error(403)
        assert Client(running.url, **{"Mcp-Image": "--privileged"}).error(400)
    said = [call["words"] for call in calls(home)]
    assert ["rm", "--force", "abc123"] in said  # left by a gateway that died
    runs = [words for words in said if words[0] == "run"]
    assert len(runs) == 2
    for words in runs:
        assert {"--rm", "--interactive", "--init", "--network=none", "--cpus=1.5"} <= set(words)
        assert "--memory=2147483648" in words
        assert words[words.index("--env") + 1] == "SECRET"
        assert not any("hush-hush" in word or word.startswith("--name") for word in words)
        assert words[-1] == "org/env:1"
    assert runs[0] != runs[1]  # each has its own cidfile


@pytest.mark.slow
def test_apptainer_runtime_runs_contained_image(tmp_path):
    home, env = fake_program(tmp_path, "apptainer")
    with gateway(tmp_path, "--runtime", "apptainer", env=env) as running:
        client = Client(running.url, **{"Mcp-Image": "org/env:1", "Env-Secret": "hush"}).open()
        assert client.call("environment")["APPTAINERENV_SECRET"] == "hush"
    said = [call["words"] for call in calls(home)]
    assert next(words for words in said if words[0] == "pull")[-1] == "docker://org/env:1"
    run = next(words for words in said if words[0] == "run")
    assert {"--containall", "--cleanenv"} <= set(run)
    assert run[-1].endswith(".sif")


def test_auto_runtime_is_first_that_works(tmp_path, monkeypatch, refusal):
    home, _ = fake_program(tmp_path, "docker")
    fake_program(tmp_path, "podman")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert image_runtime("auto", SandboxLimits(), tmp_path).name == "docker"
    (home / "down").touch()
    with refusal(RuntimeUnavailableError):
        image_runtime("docker", SandboxLimits(), tmp_path)
    with refusal(RuntimeUnavailableError):
        image_runtime("apptainer", SandboxLimits(), tmp_path)


PROJECT = """
[project]
name = "my-game"
version = "1"

[project.scripts]
my-game = "my_game:main"

[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""

# A build backend with only the standard library: installation needs no index.
BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "my_game-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("my_game.py")
        info = "my_game-1.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: my-game\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\\nmy-game = my_game:main\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def test_project_may_have_file_names_that_are_not_utf_8(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        process_runtimes, "_install", lambda folder, target: (target / "project").mkdir(parents=True)
    )
    project = tmp_path / os.fsdecode(b"spiel-\xfc")
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / os.fsdecode(b"gr\xfc\xdfe.txt")).touch()
    asyncio.run(FolderRuntime(project, SandboxLimits()).prepare(""))
    assert len(list((tmp_path / "cache").rglob("project"))) == 1


@pytest.mark.slow
def test_project_folder_is_installed_once_per_state_of_its_files(tmp_path):
    project = tmp_path / "my-game"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "backend.py").write_text(BACKEND)
    (project / "my_game.py").write_text(SERVER.read_text())
    before = sorted(path.name for path in project.iterdir())
    with gateway(tmp_path, "--dir", str(project)) as running:
        client = Client(running.url, **{"Mcp-Image": "your-org/your-env:latest"}).open()
        assert client.call("who")["cwd"].endswith("/work")
        assert "Header `Mcp-Image: your-org/your-env:latest` ignored" in running.log()
    assert sorted(path.name for path in project.iterdir()) == before
    environments = tmp_path / "cache" / "buckeye" / "environments"
    (first,) = environments.glob("my-game-*")
    made = (first / "project").stat().st_mtime_ns
    with gateway(tmp_path, "--dir", str(project)) as running:
        Client(running.url).open()
    assert (first / "project").stat().st_mtime_ns == made
    (project / "my_game.py").write_text("def main():\n    raise SystemExit('broken')\n")
    with gateway(tmp_path, "--dir", str(project)) as running:
        assert "broken" in Client(running.url).error(502)
