"""No machine is ordered for a run that could not start on it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.inference.vllm.interpreter import SUPPORTED_VLLM_VERSIONS
from buckeye.launch.preflight.check import failed, ok, skipped, warning
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.mcp.tasks.dataset import write_dataset
from buckeye.mcp.tasks.task_files import read_tasks
from buckeye.remote import clean_start, start_check
from buckeye.remote.base import RemoteRequest
from buckeye.remote.clean_start import StartInputs, clean_start_checks, hide_other_packages
from buckeye.remote.dry_run import describe_remote_run
from buckeye.remote.environments import NeededEnvironment
from buckeye.remote.manifest import project_manifest
from buckeye.remote.project import read_project
from buckeye.remote.start_check import check_start, copy_project, package_checks
from tests.remote.landlord import KEY, Landlord, serve
from tests.run.conftest import ENVIRONMENT
from tests.setup.recipe.rl_project import fill, task

CONFIG = """
output_dir = "outputs/a"
[model]
name = "tiny"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "{env}"
args = {args}
[trainer]
[inference]
"""
REQUEST = RemoteRequest(gpus=GpuSpec(count=2, type="A100_80GB"), yes=True)
MCP = '{ dataset = "tasks.json", config_path = "configs/my-env.yaml" }'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Project that can run until a test changes it, and a user without keys."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "BUCKEYE_API_KEY", "AWS_ACCESS_KEY_ID", "PRIME_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path / "home"))
    place = tmp_path / "project"
    fill(place)
    monkeypatch.chdir(place)
    (place / "letters.py").write_text(ENVIRONMENT)
    write("letters.py", "{}")
    return place


def write(env="buckeye-vf-gym", args=MCP):
    Path("run.toml").write_text(CONFIG.format(env=env, args=args))


def tasks(**changes):
    Path("tasks.json").write_text(json.dumps([{**task(0), **changes}]))
    write()


def found(*words, **options):
    """Return the failed checks of a start, as name -> line."""
    return {name: check.line for name, check in failures(*words, **options).items()}


def failures(*words, gpus=2, rented=True, only_here=()):
    """Return the failed checks of a start by name."""
    start = StartInputs(
        arguments=["@", "run.toml", *words],
        requirements=[],
        gpus=gpus,
        rented=rented,
        wheels="",
        only_here=[str(path) for path in only_here],
    )
    return {check.name: check for check in clean_start_checks(start) if check.state == "failed"}


def without_model(wrong):
    """Return failures except those of the fixture's model, which has no weights and no tokenizer."""
    return {name: line for name, line in wrong.items() if name not in ("model", "tokenizer")}


def test_what_a_start_there_would_meet(folder):
    assert without_model(found()) == {}
    assert "GPUs" in found("--trainer-gpu-ids", "2", "--inference-gpu-ids", "0")
    assert "GPUs" not in found("--trainer-gpu-ids", "2", "--inference-gpu-ids", "0", gpus=None)
    assert "configuration" in found("--max-steps", "none")
    assert failures("--max-steps", "none")["configuration"].code.startswith("BK-CONFIG")
    assert "keys" in found("--wandb.project", "p")
    assert "keys" not in found("--wandb.project", "p", rented=False)
    assert "keys" not in found("--wandb.project", "p", "--wandb.offline")
    assert "settings" in found("--trainer.loss.type", "custom", "--trainer.loss.import-path", "no.py:loss")
    (folder / "letters.py").write_text("import no_such_module\n")
    assert "no_such_module" in found()["tasks of letters"]


def test_a_server_that_only_this_machine_has(folder):
    assert "inference servers" not in found()
    assert "inference servers" in found("--no-inference")
    assert "inference servers" not in found("--orchestrator.client.base-url", '["http://10.0.0.1:8000/v1"]')


@pytest.mark.parametrize(
    ("server", "word"),
    [
        ({"url": "http://localhost:8765/mcp", "headers": {"X": "$NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ({"command": "python3", "args": ["{here}/server.py"]}, "server.py"),
        ({"command": "{here}/server.py"}, "server.py"),
        ({"command": "python3", "args": ["x"], "cwd": "{here}"}, "project"),
        ({"command": "only-beside"}, "uvx only-beside"),
        ({"url": "http://localhost:8765/mcp", "headers": {"Mcp-Image": "my-env:1"}}, "env push --image"),
        ({"url": "http://localhost:8765/mcp", "headers": {"Mcp-Image": "org/built:1"}}, "env push"),
    ],
)
def test_what_servers_of_tasks_would_not_find(folder, tmp_path, monkeypatch, server, word):
    (folder / "server.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/only-beside").write_text("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    (folder / "buckeye.lock.yaml").write_text("image: org/built:1\nbuilt_at: '2026-01-02T00:00:00+00:00'\n")
    tasks(mcp_config={"s": json.loads(json.dumps(server).replace("{here}", str(folder)))})
    line = found(only_here=[folder])["servers of the tasks"]
    assert word in line


@pytest.mark.parametrize(
    "server",
    [
        {"url": "http://localhost:8765/mcp", "headers": {"Authorization": "Bearer $BUCKEYE_API_KEY"}},
        {"url": "http://localhost:8765/mcp", "headers": {"Mcp-Image": "org/other:1"}},
        {"command": "uvx", "args": ["some-server"], "env": {"A": "${NAME:-default}"}},
        {"command": "/bin/sh", "args": ["-c", "{workdir}/server"]},
    ],
)
def test_what_servers_of_tasks_find(folder, server):
    tasks(mcp_config={"s": server})
    assert without_model(found(only_here=[folder])) == {}


def test_a_program_that_the_image_must_have_is_told(folder):
    tasks(mcp_config={"s": {"command": "no-such-program"}})
    start = StartInputs(
        arguments=["@", "run.toml"], requirements=[], gpus=2, rented=True, wheels="", only_here=[]
    )
    (line,) = [check.line for check in clean_start_checks(start) if check.state == "skipped"]
    assert "no-such-program" in line


def test_a_store_that_cannot_be_tried_here_is_told(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(clean_start, "check_store", lambda config: tried.append(1) or failed("s", "no", ""))
    monkeypatch.setattr(clean_start, "STORE_PACKAGES", {"s3": "no_such_module"})
    assert "s" not in found("--ckpt.store", "s3://bucket/run")
    monkeypatch.setattr(clean_start, "STORE_PACKAGES", {"s3": "json"})
    assert "AWS_ACCESS_KEY_ID" in found("--ckpt.store", "s3://bucket/run")["checkpoint store"]
    assert len(tried) == 1
    assert "checkpoint store" not in found("--ckpt.store", "s3://bucket/run", rented=False)


def test_keys_of_the_store_go_along_and_only_with_it(folder, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, name.lower())
    assert dict(read_project(Path("run.toml"), resume=False).secrets) == {}
    with Path("run.toml").open("a") as file:
        file.write('[trainer.ckpt]\nstore = "s3://bucket/run"\n')
    assert set(read_project(Path("run.toml"), resume=False).secrets) == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL",
    }


@pytest.fixture
def own_imports(tmp_path, monkeypatch):
    """Restore the imports of this process after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.path_importer_cache.pop(str(tmp_path), None)


def test_only_what_will_be_there_can_be_imported(tmp_path, own_imports, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/packed.py").write_text("")
    (tmp_path / "far").mkdir()
    (tmp_path / "far/editable.py").write_text("")
    sys.path.append(str(tmp_path / "far"))
    for name in ("httpx", "anthropic", "editable", "json"):
        assert importlib.util.find_spec(name) is not None
    hide_other_packages(["httpx"], str(tmp_path / "wheels"))
    for name in ("httpx", "anyio", "mine", "packed", "json", "buckeye"):
        assert importlib.util.find_spec(name) is not None, name
    for name in ("anthropic", "editable", "starlette"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert importlib.util.find_spec(name) is None, name
    (tmp_path / "anthropic.py").write_text("")
    importlib.invalidate_caches()
    assert importlib.util.find_spec("anthropic").origin == str(tmp_path / "anthropic.py")


def test_a_clean_folder_has_what_is_sent_and_no_more(folder, tmp_path):
    (folder / ".gitignore").write_text("data.json\n")
    (folder / "data.json").write_text("{}")
    (folder / "large.bin").write_bytes(bytes(2**20 + 1))
    (folder / "link").symlink_to("letters.py")
    copy_project(project_manifest(folder), tmp_path / "there")
    there = tmp_path / "there"
    assert not (there / "data.json").exists()
    assert (there / "large.bin").stat().st_size == 2**20 + 1
    assert (there / "letters.py").resolve() == there / "letters.py"
    assert (there / "link").resolve() == there / "letters.py"


UNSOLVED = "error: No solution found when resolving dependencies\n  cause: a is not to be had"


def packages(monkeypatch, *answers, environments=(), backend="torch"):
    """Return the states of the checks and the requests to uv, if uv gives these answers in order."""
    asked, left = [], list(answers)
    monkeypatch.setattr(start_check, "find_uv", lambda: "uv")
    monkeypatch.setattr(start_check, "_compile", lambda uv, *given: asked.append(given) or left.pop(0))
    Path("run.toml").write_text(f'{Path("run.toml").read_text()}backend = "{backend}"\n')
    project = read_project(Path("run.toml"), resume=False)
    object.__setattr__(project, "environments", tuple(environments))
    return [check.state for check in package_checks(project)], asked


@pytest.mark.parametrize(
    ("answers", "states"),
    [
        ([(0, "")], []),
        ([(1, UNSOLVED), (0, "")], []),
        ([(1, UNSOLVED), (1, UNSOLVED)], ["failed"]),
        ([(2, "error: Failed to fetch"), (2, "error: Failed to fetch")], ["skipped"]),
        ([(1, UNSOLVED), (1, f"{UNSOLVED}\nhint: the network was disabled")], ["skipped"]),
        ([(1, ""), (1, f"{UNSOLVED}: it does not satisfy Python>=3.13")], ["skipped"]),
    ],
)
def test_packages_that_cannot_be_had_are_known_before(folder, monkeypatch, answers, states):
    found_states, asked = packages(monkeypatch, *answers)
    assert found_states == states
    assert any(line.startswith("torch") for line in asked[0][0])
    assert any(line.startswith("httpx==") for line in asked[0][1])
    assert all(bounds == [] for _, bounds, _ in asked[1:])


@pytest.mark.parametrize(
    ("backend", "answer", "states"),
    [
        ("vllm", (1, UNSOLVED), ["failed"]),
        ("auto", (1, UNSOLVED), ["warning"]),  # the machine then runs the built-in engine
        ("vllm", (2, "error: Failed to fetch"), ["skipped"]),
        ("auto", (2, "error: Failed to fetch"), ["skipped"]),
        ("vllm", (0, ""), []),
    ],
)
def test_the_vllm_that_the_machine_installs_is_looked_for(folder, monkeypatch, backend, answer, states):
    found_states, asked = packages(monkeypatch, (0, ""), answer, backend=backend)
    assert found_states == states
    assert asked[1] == ([f"vllm{SUPPORTED_VLLM_VERSIONS}"], [], None)


def test_a_dry_run_makes_the_proof_without_a_key_and_without_the_file(folder, monkeypatch):
    """The provider cannot be asked, and the tasks import a module that does not exist anywhere."""
    monkeypatch.setattr(start_check, "package_checks", lambda project: [skipped("packages", "no uv")])
    (folder / "letters.py").write_text("import no_such_module\n")
    config = load_config(RLConfig, ["@", "run.toml"])
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").unlink()
    before = sorted(folder.rglob("*"))
    shown, errors, warnings = describe_remote_run(
        Path("outputs/new/run.toml"), config, REQUEST, resume=False, text=text
    )
    assert "letters.py" in shown
    assert [line for line in errors if "no_such_module" in line]
    assert not [line for line in errors if line.startswith("configuration")]
    assert [line for line in warnings if line.startswith("not checked: ") and "PRIME_API_KEY" in line]
    assert "not checked: packages: no uv" in warnings
    assert sorted(folder.rglob("*")) == before


def test_packages_of_environments_are_looked_for_where_they_will_come_from(folder, monkeypatch):
    environments = [
        NeededEnvironment(what="someone/other@1.2"),
        NeededEnvironment(what="a_b-1.0-py3-none-any.whl", wheel=b"x", lock=b"c==1"),
        NeededEnvironment(what="d-2.0-py3-none-any.whl", wheel=b"x", in_buckeye_venv=True),
    ]
    states, asked = packages(monkeypatch, (0, ""), (0, ""), (0, ""), environments=environments)
    assert states == []
    (run, *_), hub, wheel = asked
    assert [line.partition(" ")[0] for line in run if "file:" in line] == ["d"]
    assert (hub[0], hub[2]) == (["other==1.2"], "https://hub.primeintellect.ai/someone/simple/")
    assert (wheel[0][0].partition(" ")[0], wheel[1], wheel[2]) == ("a-b", ["c==1"], None)


def test_without_uv_it_is_told_that_packages_are_not_proved(folder, monkeypatch):
    monkeypatch.setattr(start_check, "find_uv", lambda: None)
    (check,) = package_checks(read_project(Path("run.toml"), resume=False))
    assert check.state == "skipped"


def test_all_reasons_are_in_one_message(folder, monkeypatch, refusal, wording):
    start = [ok("a", "fine"), failed("b", "is wrong", "change it"), warning("c", "is odd", "")]
    monkeypatch.setattr(start_check, "start_checks", lambda *given, **named: start)
    monkeypatch.setattr(
        start_check, "package_checks", lambda project: [failed("d", "x", ""), skipped("e", "y")]
    )
    told = []
    with refusal(UsageError):
        check_start(read_project(Path("run.toml"), resume=False), REQUEST, is_rental=True, tell=told.append)
    assert told == wording


def test_a_host_of_the_user_may_have_what_the_project_lacks(folder, monkeypatch):
    start = [
        failed("tasks of letters", "KeyError: 'MINE'", ""),
        failed("servers of the tasks", "not set: X", ""),
    ]
    monkeypatch.setattr(start_check, "start_checks", lambda *given, **named: start)
    told = []
    check_start(read_project(Path("run.toml"), resume=False), REQUEST, is_rental=False, tell=told.append)
    assert [text.partition(":")[0] for text in told[1:]] == ["warning", "warning"]
    start.append(failed("configuration", "is wrong", ""))
    with pytest.raises(UsageError):
        check_start(read_project(Path("run.toml"), resume=False), REQUEST, is_rental=False, tell=told.append)


@pytest.fixture
def landlord(monkeypatch, tmp_path):
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    made = Landlord(active_after=0, ready_after=0)
    with serve(made) as url:
        monkeypatch.setenv("PRIME_API_BASE_URL", url)
        yield made


def spoil_letters():
    Path("letters.py").write_text("import anthropic\n" + ENVIRONMENT)


def ignore_data():
    Path(".gitignore").write_text("data.json\n")
    Path("data.json").write_text("{}")
    Path("letters.py").write_text("open('data.json')\n" + ENVIRONMENT)


def read_home():
    Path("letters.py").write_text("import os\nos.environ['MINE']\n" + ENVIRONMENT)


def spoil_dataset():
    write_dataset(Path("data"), "tasks", {"train": read_tasks(Path("tasks.json"))})
    (file,) = Path("data").rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    write(args=MCP.replace("tasks.json", "data"))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (spoil_letters, "anthropic"),
        (ignore_data, "data.json"),
        (read_home, "MINE"),
        (spoil_dataset, "parquet"),
    ],
)
def test_no_order_is_placed_for_a_plan_that_cannot_run(folder, landlord, run_rl, monkeypatch, spoil, word):
    """A local package, an ignored file or a local variable is missing there, or a dataset is truncated."""
    monkeypatch.setenv("MINE", "1")
    spoil()
    code, _, err = run_rl("@", "run.toml", "--provider", "prime", "--gpus", "2xA100", "--yes")
    assert code == 2
    assert word in err
    assert landlord.requests == []
