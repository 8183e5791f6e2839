"""A step as one file: what is in it, what is not, and that one of a stranger's is looked at first."""

import json
import shutil
import zipfile

import pytest
from tests.command import run_here

SECRET = "sk-abcdefghijklmnopqrstuvwxyz012345"


@pytest.fixture(scope="module")
def bundled(finished, tmp_path_factory):
    """A folder with `run`, a copy of a run of 5 steps that has told secrets, and the bundle of step 3."""
    root = tmp_path_factory.mktemp("bundled")
    shutil.copytree(finished.root / "out", root / "run", symlinks=True)
    for name in ("events.jsonl", "rollouts/step_3.jsonl"):
        with (root / "run" / name).open("a") as file:
            file.write(json.dumps({"time": 0.0, "event": "start", "attempt": 1, "api_key": SECRET}) + "\n")
            file.write(json.dumps({"event": "start", "note": f"Bearer {SECRET} was given"}) + "\n")
    (log,) = (root / "run/logs").glob("attempt_1/trainer.stdout")
    with log.open("a") as file:
        file.write(f"key: {SECRET}\n")
    settings = root / "run/configs/rl.json"
    content = json.loads(settings.read_text())
    content["orchestrator"]["env"][0]["args"] = {"api_key": "short"}
    settings.write_text(json.dumps(content))
    done = run_here("rl", "bundle", "run", "--step", 3, "--out", "bug.zip", "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(source, target, change):
    """The bundle with other contents; `change` is given them, and what the index says."""
    files = contents(source)
    index = json.loads(files.pop("bundle.json"))
    change(files, index)
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("bundle.json", json.dumps(index))
        for name, content in files.items():
            archive.writestr(name, content)
    return target


def test_the_step_is_computed_again_where_the_run_is_not(bundled, tmp_path):
    root, told = bundled
    assert (told["step"], told["until"], told["left_out"]) == (3, "weights", [])
    shutil.copy(root / "bug.zip", tmp_path)
    done = run_here("rl", "replay", "bug.zip", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["step"], found["identical"]) == (3, True)
    assert found["comparisons"][-1]["stage"] == "weights"
    assert [path.name for path in tmp_path.iterdir()] == ["bug.zip"]
    seen = run_here("rl", "diagnose", "bug.zip", "--json", cwd=tmp_path)
    assert seen.returncode in (0, 1)
    assert json.loads(seen.stdout)["not_looked_at"] == []


def test_no_secret_is_in_it(bundled):
    root, _ = bundled
    files = contents(root / "bug.zip")
    assert {"events.jsonl", "metrics.jsonl", "rollouts/step_3.jsonl", "configs/trainer.json"} < set(files)
    assert any(name.endswith("trainer.stdout") for name in files)
    assert b"(redacted) was given" in files["events.jsonl"]
    assert not [name for name, content in files.items() if SECRET.encode() in content]
    assert json.loads(files["configs/rl.json"])["orchestrator"]["env"][0]["args"]["api_key"] == "(redacted)"
    assert not [name for name in files if "orchestrator/state" in name]


def test_nothing_is_overwritten_and_what_has_no_room_is_said(bundled):
    root, _ = bundled
    before = (root / "bug.zip").read_bytes()
    done = run_here("rl", "bundle", "run", "--step", 3, "--out", "bug.zip", cwd=root)
    assert done.returncode == 2
    assert "bug.zip is there already" in done.stderr
    assert (root / "bug.zip").read_bytes() == before
    done = run_here("rl", "bundle", "run", "--step", 9, cwd=root)
    assert done.returncode == 2
    assert "There are those of steps 0 to 4" in done.stderr
    done = run_here("rl", "bundle", "run", "--step", 2, "--max-mb", 1, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "run-step-2.zip: " in done.stdout


def test_without_room_for_weights_only_what_is_known_is_in_it(bundled, monkeypatch):
    root, _ = bundled
    for path in (root / "run/weights").glob("step_*"):
        shutil.rmtree(path)
    monkeypatch.setattr("buckeye_audit.replay.bundle._FOLDERS", ("trained",))
    from buckeye.config.load import load_config
    from buckeye.config.trainer import TrainerConfig
    from buckeye_audit.replay.bundle import write_bundle

    config = load_config(TrainerConfig, ["@", str(root / "run/configs/trainer.json")])
    made = write_bundle(root / "run", config, 3, root / "small.zip", max_bytes=150_000)
    assert made.until is None
    assert any(line.startswith("what the step is computed from as far as weights") for line in made.left_out)


def link(files, index):
    name = "configs/link.json"
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    index["files"][name] = {"bytes": 11, "sha256": "0" * 64}
    files[info] = b"/etc/passwd"


def named(name):
    def change(files, index):
        files[name] = b"{}"
        index["files"][name] = {
            "bytes": 2,
            "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        }

    return change


def changed(files, index):
    files["configs/trainer.json"] += b" "


def longer(files, index):
    files["metrics.jsonl"] = b"\n" * 50_000_000


def unlisted(files, index):
    files["configs/more.json"] = b"{}"


def huge(files, index):
    index["files"]["metrics.jsonl"]["bytes"] = 10**15


def other_format(files, index):
    index["format"] = 2


def own_loss(files, index):
    content = json.loads(files["configs/trainer.json"])
    content["loss"] = {"type": "custom", "import_path": "os:system"}
    files["configs/trainer.json"] = json.dumps(content).encode()
    import hashlib

    sha = hashlib.sha256(files["configs/trainer.json"]).hexdigest()
    index["files"]["configs/trainer.json"] = {"bytes": len(files["configs/trainer.json"]), "sha256": sha}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (named("../out.json"), "no file of a bundle"),
        (named("/tmp/out.json"), "no file of a bundle"),
        (named("configs/../../out.json"), "no file of a bundle"),
        (named("configs\\..\\out.json"), "no file of a bundle"),
        (named("weights/step_1/model.pkl"), "no file of a bundle"),
        (named("letters.py"), "no file of a bundle"),
        (link, "is a link or a device"),
        (changed, "is not the file that was put into it"),
        (longer, "is not the file that was put into it"),
        (unlisted, "holds other files than its bundle.json says"),
        (huge, "would take more than"),
        (other_format, "has the format 2"),
        (own_loss, "has a loss function of its own"),
    ],
)
def test_a_strangers_bundle_is_looked_at_first(bundled, tmp_path, change, said):
    root, _ = bundled
    folder = tmp_path / "in" / "here"
    folder.mkdir(parents=True)
    rewritten(root / "bug.zip", folder / "hostile.zip", change)
    done = run_here("rl", "replay", "hostile.zip", cwd=folder)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "hostile.zip", "in"]


def test_what_is_no_bundle_is_said(bundled, tmp_path):
    (tmp_path / "text.zip").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "")
    locked = bytearray((bundled[0] / "bug.zip").read_bytes())
    at = -1
    while (at := locked.find(b"PK\x01\x02", at + 1)) >= 0:
        locked[at + 8] |= 1  # as where a password is needed
    (tmp_path / "locked.zip").write_bytes(locked)
    for name, said in (
        ("text.zip", "cannot be read as a bundle"),
        ("locked.zip", "cannot be read as a bundle"),
        ("other.zip", "it has no bundle.json"),
    ):
        done = run_here("rl", "replay", name, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
    done = run_here("rl", "diagnose", bundled[0] / "bug.zip", "--try", cwd=tmp_path)
    assert done.returncode == 2
    assert "which a bundle does not bring" in done.stderr
    done = run_here("rl", "replay", bundled[0] / "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "--step N" in done.stderr


def test_what_fails_with_a_bundle_that_was_read_is_no_fault_of_it(bundled):
    from buckeye_audit.replay.bundle import opened

    with pytest.raises(OSError, match="disk is full"), opened(str(bundled[0] / "bug.zip")):
        raise OSError("the disk is full")
