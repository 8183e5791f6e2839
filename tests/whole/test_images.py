"""The images of the Containerfile. No container registry is needed: their base is made by debootstrap.

Needs root, and `apt-get install buildah debootstrap`. The base is made once, under .cache/.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.places import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap"))),
        reason="needs root and: apt-get install buildah debootstrap",
    ),
]
DEBIAN = ROOT / ".cache" / "debian"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
SHARED = (
    "/etc/pip.conf",
    "/etc/ssl/certs",
    "/usr/share/ca-certificates",
    os.environ.get("PIP_FIND_LINKS", ""),
)
"""Settings, certificates and packages of this machine's pip, for the build."""
SECONDS = 3_600
TRAINING = """
set -e
for n in $(seq 50); do echo "one two three $n"; done > corpus.txt
chat='[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]'
echo "{\\"messages\\": $chat}" > chats.jsonl
buckeye model tiny base --corpus corpus.txt --vocab-size 300 --layers 1 --hidden 64
buckeye sft --model.name base --data.path chats.jsonl --max-steps 2 --batch-size 1 --output-dir out
rl --version
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    subprocess.run([sys.executable, "tools/release.py"], cwd=ROOT, check=True)
    if not (DEBIAN / "usr/bin/python3").exists():
        shutil.rmtree(DEBIAN, ignore_errors=True)
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(DEBIAN))
    folder = tmp_path_factory.mktemp("base")
    (folder / "Containerfile").write_text(
        "FROM scratch\nCOPY . /\nENV PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin\n"
    )
    with image("base", str(DEBIAN), "-f", str(folder / "Containerfile")) as made:
        yield made


def test_trainer_image_trains(base):
    links = os.environ.get("PIP_FIND_LINKS")
    version = re.search(r'^TORCH = "(.+)"', (ROOT / "tools/setup.py").read_text(), re.M)[1]
    torch = ["--build-arg", f"TORCH=torch=={version}+cpu --find-links {links}"] if links else []
    with image("cpu", str(ROOT), "--build-arg", f"BASE={base}", *torch) as made:
        assert "buckeye 0." in run_in(made, "sh", "-c", TRAINING)
        assert "nvidia" not in run_in(made, "/opt/buckeye/bin/pip", "list")


def test_cuda_image_trains_without_a_gpu(base):
    with image("cuda", str(ROOT), "--build-arg", f"BASE={base}", "--build-arg", "TORCH=torch") as made:
        assert "buckeye 0." in run_in(made, "sh", "-c", TRAINING)
        assert "nvidia" in run_in(made, "/opt/buckeye/bin/pip", "list")
        assert run_in(made, "python3", "-c", "import torch; print(torch.version.cuda)").strip() != "None"


def test_environment_image_is_a_base_without_torch(base, tmp_path):
    arguments = ("--build-arg", f"BASE={base}", "--build-arg", "TORCH=", "--build-arg", "EXTRAS=mcp")
    with image("env", str(ROOT), *arguments) as made:
        packages = run_in(made, "pip", "list")
        assert re.search(r"^mcp ", packages, re.M)
        assert not re.search(r"^torch ", packages, re.M)
        game = ROOT / "environments/text_2048"
        dockerfile = (game / "Dockerfile").read_text().replace("python:3.12-slim", made)
        (tmp_path / "Dockerfile").write_text(dockerfile)
        with image("game", str(game), "-f", str(tmp_path / "Dockerfile")) as derived:
            assert run_in(derived, "which", "text-2048").strip() == "/opt/buckeye/bin/text-2048"


@contextmanager
def image(name, context, *arguments):
    """Build an image, yield its name, and delete it."""
    made = f"localhost/buckeye-test-{name}-{os.getpid()}"
    volumes = [
        word for path in SHARED if Path(path).exists() and path for word in ("--volume", f"{path}:{path}:ro")
    ]
    run("buildah", "bud", "--isolation", "chroot", *volumes, "-t", made, *arguments, context)
    try:
        yield made
    finally:
        run("buildah", "rmi", "--force", made)


def run_in(made, *command):
    """Run a command in a container of an image; return what it printed."""
    container = run("buildah", "from", "--pull-never", made).split()[-1]
    try:
        return run("buildah", "run", "--isolation", "chroot", container, "--", *command)
    finally:
        run("buildah", "rm", container)


def run(*argv):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
