"""Checkpoints in S3, on a real server: killed runs that lose their directory, cut uploads, and errors."""

import shutil
import subprocess
import uuid

import httpx
import pytest

from buckeye.base.faults import FAULTS, FAULTS_DONE
from buckeye.transport.object_store import CheckpointStore
from tests.command import run_here
from tests.ports import free_port
from tests.remote.venvs import venv_with
from tests.run.conftest import Runner, tiny_model  # noqa: F401  a fixture
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
BUCKET = "buckeye-tests"


def moto():
    """Server program of moto, in a separate environment because it needs another boto than s3fs."""
    return venv_with("moto", "moto[server]>=5.1") / "moto_server"


@pytest.fixture(scope="module")
def server():
    """Moto server with a bucket; the value holds its variables."""
    port = free_port()
    process = subprocess.Popen(
        [moto(), "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def answers():
        try:
            return httpx.put(f"{url}/{BUCKET}").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(answers)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def keys(server, monkeypatch):
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def url():
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def runner(tmp_path, tiny_model, keys):  # noqa: F811
    return Runner(tmp_path, tiny_model)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_model):  # noqa: F811
    """Final weights of a synchronous run without interruption."""
    runner = Runner(tmp_path_factory.mktemp("straight"), tiny_model)
    runner.ok(runner.rl("out", steps=6, level=0))
    return (runner.root / "out" / "weights" / "step_6" / "model.safetensors").read_bytes()


PLACES = ["store.upload=kill@3", "store.upload=kill@15", "store.before_commit=kill@2"]
PLACES += ["store.committed=kill@2", "store.deleted=kill@2"]


@pytest.mark.parametrize("place", PLACES)
def test_killed_in_an_upload_without_its_directory_it_ends_with_the_same_weights(
    runner, url, uninterrupted, place
):
    marks = runner.root / "marks"
    marks.mkdir()
    words = ("--ckpt.interval", 1, "--ckpt.keep", 1, "--ckpt.store", url)
    words += (
        "--orchestrator.env.0.rate-limit",
        20,
    )  # faster steps would replace checkpoints before their upload
    runner.env |= {FAULTS: place, FAULTS_DONE: str(marks)}
    killed = runner.run(runner.rl("out", *words, steps=6, level=0))
    assert killed.returncode == -9, killed.stdout + killed.stderr
    (committed,) = [info.step for info in CheckpointStore(url).list_checkpoints()][-1:] or [0]
    assert "a-secret-of-the-tests" not in _all_text(runner.root)
    shutil.rmtree(runner.root / "out")
    resume = ("--resume",) if committed else ()
    done = runner.ok(runner.rl("out", *words, *resume, steps=6, level=0))
    assert ("Resuming from" in done.stdout) == bool(committed)
    weights = runner.root / "out" / "weights" / "step_6" / "model.safetensors"
    assert weights.read_bytes() == uninterrupted
    (newest,) = CheckpointStore(url).list_checkpoints()
    assert newest.step == 6
    names = {name.partition("/")[0] for name in CheckpointStore(url)._objects()}
    assert names == {newest.path.name}


def _all_text(root):
    return "".join(
        path.read_text(errors="replace")
        for path in root.rglob("*")
        if path.is_file() and path.suffix in (".json", ".jsonl", ".log", ".stdout", ".toml")
    )


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({}, "s3://no-such-bucket/x", "the bucket does not exist"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, f"s3://{BUCKET}/x", "no reply"),
        (
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "HOME": "/nonexistent"},
            f"s3://{BUCKET}/x",
            "no valid credentials",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(runner, changes, place, said):
    runner.env |= changes
    runner.env = {name: value for name, value in runner.env.items() if value is not None}
    done = runner.run(runner.rl("out", "--ckpt.store", place))
    assert done.returncode == 2, done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "checkpoint store" in line]
    assert said in line
    assert place in line
    assert "a-secret-of-the-tests" not in done.stderr + done.stdout
    assert not (runner.root / "out").exists()


def test_uploads_in_parts_that_were_cut_off_are_ended_and_those_of_others_are_not(keys, url, tmp_path):
    store = CheckpointStore(url)
    call, prefix = store._fs.call_s3, url.rpartition("/")[2]
    ours = f"{prefix}/step_2-attempt_1-abcdef012345/trainer/optimizer.safetensors"
    newer = f"{prefix}/step_4-attempt_9-abcdef012345/trainer/optimizer.safetensors"
    theirs = [f"{prefix}/step_two/x", f"{prefix}-beside/step_2-attempt_1-abcdef012345/x", "x", newer]
    for name in (ours, *theirs):
        call("create_multipart_upload", Bucket=BUCKET, Key=name)
    store._fs.pipe_file(f"{BUCKET}/{prefix}/step_2-attempt_1-{'0' * 12}/COMMITTED", b"{}")
    store.prune(3, protected=())
    left = {each["Key"] for each in call("list_multipart_uploads", Bucket=BUCKET)["Uploads"]}
    assert left == set(theirs)


def test_keys_in_an_url_are_refused_and_not_repeated(tmp_path):
    done = run_here(
        "rl", "--trainer", "--orchestrator", "--ckpt.store", "s3://AKIA:geheim@bucket/x", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "ckpt.store" in done.stderr
    assert "geheim" not in done.stderr
