"""What is decided for nodes that do not share the directory of a run, and what their processes do first."""

from __future__ import annotations

import atexit
import json
import sys
import time
from pathlib import Path

import msgspec
import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.hosts import Facts, Nodes, Start
from buckeye.run_files.directory import clean, files_of_a_run, place_checkpoints, put_aside
from buckeye_machines.engines import apart
from buckeye_machines.engines.apart import COPY, Courier, Place, prepare, reached
from buckeye_machines.engines.files_client import GoneError, Source
from buckeye_machines.engines.files_server import Files, FileServer
from tests.waiting import wait_for

KEY = "the-key-of-this-run"
HERE = "127.0.0.1"


class Node:
    """A host that sees what is below `seen`."""

    absent = None

    def __init__(self, name: str, *seen: Path) -> None:
        self._name, self._seen = name, seen
        self.started: list[Start] = []

    def facts(self) -> Facts:
        return Facts(
            name=self._name, version="1", python="3", cores=1, gpus=(), address="10.0.0.2", variables={}
        )

    def sees(self, path: Path, content: str) -> bool:
        return any(path.is_relative_to(one) for one in self._seen) and path.read_text() == content

    def choose_ports(self, count: int) -> list[int]:
        return list(range(count))

    def start(self, start: Start) -> None:
        self.started.append(start)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def config(tmp_path, *words):
    given = ["--trainer", "--orchestrator.env.0.id", "x", "--inference", "{}", "--cluster.nodes", "3"]
    given += ["--output-dir", str(tmp_path / "out"), "--model.name", str(tmp_path / "model"), *words]
    return load_config(RLConfig, given, environ={})


def nodes(*hosts):
    return Nodes(address=HERE, hosts=dict(enumerate(hosts, 1)))


def refusal(settings, *hosts):
    with pytest.raises(UsageError) as raised, reached(settings, nodes(*hosts)):
        pass
    return str(raised.value)


def test_nodes_that_share_the_directory_are_left_as_they_are(tmp_path):
    found = nodes(Node("n1", tmp_path), Node("n2", tmp_path))
    with reached(config(tmp_path), found) as same:
        assert (same.address, same.hosts) == (found.address, found.hosts)
    assert list((tmp_path / "out").iterdir()) == []


def test_without_a_place_for_checkpoints_the_message_says_what_to_set(tmp_path):
    said = refusal(config(tmp_path), Node("n1"), Node("n2"))
    assert f"node 1 (n1) does not see {tmp_path}/out of this host" in said
    assert "set cluster.checkpoint_dir" in said


def test_a_place_for_checkpoints_that_a_node_does_not_see_is_refused(tmp_path):
    place = tmp_path / "place"
    said = refusal(config(tmp_path, "--cluster.checkpoint-dir", str(place)), Node("n1", place), Node("n2"))
    assert f"node 2 (n2) does not see cluster.checkpoint_dir = {place}" in said


@pytest.mark.parametrize(
    ("setting", "seen", "said"),
    [("true", False, "cluster.shared_output_dir = true"), ("false", True, "leave the setting out")],
)
def test_what_is_said_of_the_directory_must_be_so(tmp_path, setting, seen, said):
    hosts = [Node(name, *([tmp_path] if seen else [])) for name in ("n1", "n2")]
    assert said in refusal(config(tmp_path, "--cluster.shared-output-dir", setting), *hosts)


def test_some_that_see_it_and_some_that_do_not_are_refused(tmp_path):
    said = refusal(config(tmp_path), Node("n1", tmp_path), Node("n2"))
    assert "node 2 (n2) does not see" in said
    assert "others do" in said


@pytest.fixture
def serving(tmp_path, model, monkeypatch):
    """Three nodes without a shared directory, the second of which has the first rank."""
    monkeypatch.setattr(apart, "fetch_model", Path)
    place = tmp_path / "place"
    words = ("--cluster.checkpoint-dir", str(place), "--cluster.trainer-nodes", "2,1")
    hosts = Node("n1", place), Node("n2", place)
    with reached(config(tmp_path, *words), nodes(*hosts)) as found:
        yield found, hosts


def test_a_process_is_started_by_what_brings_it_the_files(serving, tmp_path):
    found, hosts = serving
    argv = [sys.executable, "-m", "buckeye", "trainer", "@", "x.json"]
    for number in (1, 2):
        found.hosts[number].start(Start(title="t", argv=argv, env={"RANK": "0"}, stdout=tmp_path / "t"))
    for host, trains in zip(hosts, (False, True), strict=True):
        [start] = host.started
        assert start.argv == [
            sys.executable,
            "-m",
            "buckeye_machines.engines.apart",
            "trainer",
            "@",
            "x.json",
        ]
        place = msgspec.json.decode(start.env["BUCKEYE_FILES"], type=Place)
        assert (place.trains, place.root) == (trains, f"{tmp_path}/out")
        assert start.env["BUCKEYE_FILES_KEY"] not in " ".join(start.argv)
        assert Source(place.host, place.port, start.env["BUCKEYE_FILES_KEY"]).index().steps["weights"] == {}


def test_who_has_the_first_rank_is_followed(serving, tmp_path):
    found, hosts = serving
    found.hosts[1].start(Start(title="t", argv=["p", "-m", "buckeye", "trainer"], env={}, stdout=tmp_path))
    env = hosts[0].started[0].env
    place = msgspec.json.decode(env["BUCKEYE_FILES"], type=Place)
    for number in (1, 2):  # another one stands in for the first
        there = tmp_path / f"there{number}"
        step = there / "weights" / f"step_{number}"
        step.mkdir(parents=True)
        (step / "model.safetensors").write_bytes(b"w")
        server = FileServer(Files(there), address=HERE, key=env["BUCKEYE_FILES_KEY"])
        Source(place.host, place.port, env["BUCKEYE_FILES_KEY"]).post("/source", {"port": server.port})
        came = tmp_path / "out" / "weights" / f"step_{number}" / "model.safetensors"
        wait_for(came.exists, "the weights come")
        server.close()


@pytest.fixture
def node(tmp_path, model):
    """What a process of a node is told, and node 0 as it sees it."""
    there = tmp_path / "there"
    (there / "configs").mkdir(parents=True)
    (there / "configs" / "trainer.json").write_text("{}")
    (there / "run.json").write_text(json.dumps({"run_id": "run", "attempt": 1, "attempts": []}))
    server = FileServer(Files(there, model=model), address=HERE, key=KEY)
    place = Place(
        host=HERE,
        port=server.port,
        root=str(tmp_path / "here"),
        model=str(tmp_path / "elsewhere" / "model"),
        checkpoints=str(tmp_path / "place"),
        trains=True,
    )
    yield place, Source(HERE, server.port, KEY)
    server.close()


def test_a_node_has_settings_and_model_before_its_process_reads_them(node, tmp_path, capsys):
    place, source = node
    prepare(place, source, "run", "trainer")
    root = tmp_path / "here"
    assert (root / "configs").stat().st_mode & 0o077 == 0
    assert json.loads((root / "run.json").read_text())["run_id"] == "run"
    assert (Path(place.model) / "config.json").exists()
    assert (root / "checkpoints").readlink() == tmp_path / "place"
    assert "fetched from node 0" in capsys.readouterr().out
    prepare(place, source, "run", "trainer")
    assert "fetched" not in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "comes"), [("trainer", True), ("inference", False)])
def test_a_trainer_is_brought_the_checkpoint_that_it_goes_on_from(tmp_path, model, kind, comes):
    there = tmp_path / "there"
    for step in (3, 4):
        state = there / "checkpoints" / f"step_{step}" / "trainer" / "state"
        state.parent.mkdir(parents=True)
        state.write_text(str(step))
    (there / "configs").mkdir()
    (there / "configs" / "trainer.json").write_text(json.dumps({"ckpt": {"resume_step": 3}}))
    folders = ("batches", "weights", "evals", "checkpoints")
    server = FileServer(Files(there, folders), address=HERE, key=KEY)
    place = Place(
        host=HERE,
        port=server.port,
        root=str(tmp_path / "here"),
        model=str(model),
        checkpoints=None,
        trains=True,
    )
    source = Source(HERE, server.port, KEY)
    prepare(place, source, "run", kind)
    came = tmp_path / "here" / "checkpoints"
    assert came.exists() == comes
    if comes:
        assert [path.name for path in came.iterdir()] == ["step_3"]
        assert (came / "step_3" / "trainer" / "state").read_text() == "3"
        before = (came / "step_3").stat().st_ino
        prepare(place, source, "run", kind)
        assert (came / "step_3").stat().st_ino == before
    server.close()


def test_a_node_with_a_run_of_its_own_keeps_it(node, tmp_path):
    place, source = node
    (tmp_path / "here" / "weights").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"holds a run of its own \(weights\)"):
        prepare(place, source, "run", "trainer")
    assert list((tmp_path / "here" / "weights").parent.glob("configs")) == []


def test_copies_of_an_earlier_run_go_and_files_of_others_stay(node, tmp_path):
    place, source = node
    root = tmp_path / "here"
    prepare(place, source, "run", "trainer")
    (root / "weights" / "step_3").mkdir(parents=True)
    (root / "metrics.jsonl").write_text("{}\n")
    (root / "notes.txt").write_text("mine")
    (tmp_path / "place" / "step_1").mkdir(parents=True)
    prepare(place, source, "another", "trainer")
    assert not (root / "weights").exists()
    assert not (root / "metrics.jsonl").exists()
    assert (root / "notes.txt").read_text() == "mine"
    assert (tmp_path / "place" / "step_1").exists()
    assert json.loads((root / COPY).read_text())["run_id"] == "another"


def test_what_the_first_rank_leaves_is_on_node_0_before_it_ends(node, tmp_path, monkeypatch):
    place, source = node
    monkeypatch.setenv("RANK", "0")
    prepare(place, source, "run", "trainer")
    courier = Courier(place, KEY, ["trainer"])
    monkeypatch.setattr(apart.atexit, "register", lambda call: None)
    followed = []
    server = FileServer(
        Files(tmp_path / "there"), address=HERE, key=KEY, found=lambda *where: followed.append(where)
    )
    courier._place = msgspec.structs.replace(place, port=server.port)
    courier.start(HERE)
    root = Path(place.root)
    step = root / "weights" / "step_1"
    step.mkdir(parents=True)
    (step / "model.safetensors").write_bytes(b"w")
    (root / "metrics.jsonl").write_text('{"step": 0}\n')
    began = time.monotonic()
    from buckeye_machines.engines.files_client import Follower

    late = Follower(Source(*followed[0], KEY), tmp_path / "there", ("weights",))
    late.start()
    courier.settle()
    assert time.monotonic() - began < 60
    assert (tmp_path / "there" / "weights" / "step_1" / "model.safetensors").exists()
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == '{"step": 0}\n'
    late.close()
    courier._follower.close()
    atexit.unregister(courier.settle)
    server.close()


def test_a_process_that_cannot_begin_says_why(node, tmp_path, monkeypatch, capsys):
    place, _ = node
    (tmp_path / "here" / "rollouts").mkdir(parents=True)
    monkeypatch.setenv("BUCKEYE_FILES", msgspec.json.encode(place).decode())
    monkeypatch.setenv("BUCKEYE_FILES_KEY", KEY)
    monkeypatch.setenv("BUCKEYE_RUN_ID", "run")
    monkeypatch.setattr(sys, "argv", ["apart", "trainer", "@", "x.json"])
    with pytest.raises(SystemExit, match="2"):
        apart.main()
    assert "holds a run of its own (rollouts)" in capsys.readouterr().err


def test_what_node_0_does_not_have_is_no_loop(node):
    _, source = node
    with pytest.raises(GoneError):
        source.listing("weights", "7")


# The place of the checkpoints.


def test_checkpoints_lead_to_their_place_and_stay_a_run_of_nobody(tmp_path):
    out, place = tmp_path / "out", tmp_path / "place"
    place_checkpoints(out, place)
    place_checkpoints(out, place)
    assert (out / "checkpoints").resolve() == place
    assert files_of_a_run(out) == []
    assert put_aside(out) is None
    (place / "step_1").mkdir()
    assert files_of_a_run(out) == [out / "checkpoints"]


def test_checkpoints_that_are_elsewhere_are_not_left(tmp_path):
    (tmp_path / "out" / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(UsageError, match="leave the setting as it was"):
        place_checkpoints(tmp_path / "out", tmp_path / "place")


def test_clean_takes_the_checkpoints_of_the_run_and_nothing_else_of_their_place(tmp_path):
    out, place = tmp_path / "out", tmp_path / "place"
    place_checkpoints(out, place)
    (place / "step_1").mkdir()
    (place / "notes").write_text("mine")
    (out / "run.json").write_text("{}")
    clean(out)
    assert [path.name for path in place.iterdir()] == ["notes"]
    assert list(out.iterdir()) == []
