"""`buckeye rl @ run.toml --provider ...` from the command to the model; only the provider is fake."""

import functools
import json
import os
import re
import signal

import pytest

from buckeye.transport.checkpoint import list_checkpoints, verify_checkpoint
from tests.remote.landlord import KEY
from tests.remote.laptop import SECRET, Laptop, assert_trained, cmdline, files_with, wait_for
from tests.remote.machine import needs_machines
from tests.remote.sshd import needs_sshd, processes_of, sshd
from tests.remote.town import assert_nothing_left
from tests.small_disk import small_disk

pytestmark = [
    needs_sshd,
    needs_machines,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_goes_on"),
]


def test_a_host_of_mine(tmp_path, model):
    laptop = Laptop(tmp_path / "laptop", model)
    with sshd(tmp_path / "host") as host:
        code = laptop.run("--provider", "ssh", "--host", host.address, "--identity-file", host.key)
        assert code == 0, laptop.said()
        assert_trained(laptop, 3)
        assert "training finished!" in laptop.said()
        assert ": HF_TOKEN" in laptop.said()
        assert files_with(SECRET, host.home, laptop.home, laptop.output) == []
        seen = json.loads(laptop.command("status", "outputs/run", "--json"))
        assert (seen["state"], seen["step"], seen["checkpoint_step"]) == ("finished", 3, 3)
        assert "training finished!" in laptop.command("logs", "outputs/run")
        assert json.loads(laptop.command("replay", "outputs/run", "--step", "1", "--json"))["step"] == 1


def test_run_continues_after_the_reader_of_its_output_has_ended(tmp_path, model):
    laptop = Laptop(tmp_path / "laptop", model)
    with sshd(tmp_path / "host") as host:
        read, write = os.pipe()
        with open(write, "wb") as out:
            words = ("--provider", "ssh", "--host", host.address, "--identity-file", host.key)
            running = laptop.start(*words, out=out)
        os.close(read)
        assert running.wait() == 0
        assert_trained(laptop, 3)
        assert json.loads(laptop.command("status", "outputs/run", "--json"))["state"] == "finished"


def test_a_run_elsewhere_is_stopped_from_here(tmp_path, model):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    with sshd(tmp_path / "host") as host:
        running = laptop.start("--provider", "ssh", "--host", host.address, "--identity-file", host.key)
        wait_for(lambda: "Step 1/" in laptop.said(), laptop.said)
        attach = laptop.command("pods", "attach", "outputs/run").split()
        assert attach[:2] == ["ssh", "-t"]
        assert attach[-4:-1] == ["tmux", "-L", attach[-2]]
        laptop.command("stop", "outputs/run")
        assert running.wait() == 130
        assert "--resume --provider ssh" in laptop.said().splitlines()[-1]
        last = list_checkpoints(laptop.output / "checkpoints")[-1]
        verify_checkpoint(last)
        seen = json.loads(laptop.command("status", "outputs/run", "--json"))
        assert (seen["state"], seen["checkpoint_step"]) == ("stopped", last.step)
        assert [pid for pid in processes_of(host.folder) if b"buckeye" in cmdline(pid)] == []


def test_resume_after_a_killed_command_continues_from_the_newest_remote_checkpoint(tmp_path, model):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    with sshd(tmp_path / "host") as host:
        words = ("--provider", "ssh", "--host", host.address, "--identity-file", host.key)
        running = laptop.start(*words)
        wait_for(lambda: "Step 1/" in laptop.said(), laptop.said)
        running.kill()
        running.wait()
        (job,) = (host.home / ".buckeye/jobs").iterdir()
        wait_for(lambda: "Step 40/" in (job / "log").read_text(), laptop.said)
        resumed = laptop.start("--resume", *words)
        wait_for(lambda: "Resuming from the checkpoint of step" in laptop.said(), laptop.said)
        assert (job / "rc").read_text() == "130"
        assert list_checkpoints(laptop.output / "checkpoints")[-1].step >= 40
        resumed.send_signal(signal.SIGINT)
        assert resumed.wait() == 130


def test_a_pod_that_is_taken_away_and_another_one(tmp_path, model, town):
    laptop = Laptop(tmp_path / "laptop", model, steps=40)
    running = laptop.start(*town.words, **town.environment)
    wait_for(lambda: list_checkpoints(laptop.output / "checkpoints"), laptop.said)
    town.landlord.vanish(next(iter(town.landlord.pods)))
    assert running.wait() == 1
    said = laptop.said()
    assert "is gone" in said
    assert "@ run.toml --resume" in said
    kept = list_checkpoints(laptop.output / "checkpoints")[-1].step
    code = laptop.run("--resume", *town.words, **town.environment)
    assert code == 0, laptop.said()
    assert f" step {kept}" in laptop.said()
    assert_trained(laptop, 40)
    assert_nothing_left(town, laptop)


def test_a_laptop_that_is_lost(tmp_path, model, town):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    own = {"BUCKEYE_DEAD_MAN_MINUTES": "0.2", "BUCKEYE_POD_KEY": KEY}
    running = laptop.start(*town.words, **town.environment, **own)
    wait_for(lambda: "Step 2/" in laptop.said(), laptop.said)
    assert len(town.landlord.alive) == 1
    folder = town.host.folder
    running.kill()
    running.wait()
    wait_for(lambda: not town.landlord.alive, lambda: "the pod is still there", seconds=900)
    wait_for(lambda: not processes_of(folder), lambda: processes_of(folder), seconds=300)
    (job,) = (folder / "home/.buckeye/jobs").iterdir()
    assert (job / "rc").read_text() == "130"
    assert (job / "dead_man").stat().st_size > 0
    assert_nothing_left(town, laptop)


@pytest.mark.parametrize("stage", ["Connecting to", "4/5", "The run has started", "Step 1/"])
def test_ctrl_c_at_each_stage_leaves_nothing(tmp_path, model, town, stage):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    running = laptop.start(*town.words, **town.environment)
    wait_for(lambda: stage in laptop.said(), laptop.said)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 130, laptop.said()
    assert "Traceback" not in laptop.said()
    assert_nothing_left(town, laptop)
    if stage == "Step 1/":
        assert list_checkpoints(laptop.output / "checkpoints")


@pytest.mark.parametrize(
    ("room", "reason"),
    [
        (200_000, "could not receive the project"),
        (3_000_000, "full"),
    ],
)
def test_a_disk_that_is_full_there(tmp_path, model, town, room, reason):
    """The disk is full before the run or while it writes weights: the run ends, and its files are pulled."""
    town.home = functools.partial(small_disk, size=room)
    laptop = Laptop(tmp_path / "laptop", model, steps=200)
    (laptop.project / "data.bin").write_bytes(bytes(1_000_000))
    with (laptop.project / "run.toml").open("a") as file:
        file.write("[disk]\ncheck = false\n")
    code = laptop.run(*town.words, **town.environment)
    said = laptop.said()
    assert code == 1, said
    assert reason in said
    assert "Traceback" not in said
    assert re.search(r"failed: .*; [0-9.]+ min, \$\d\.\d\d\. ", said) or room > 1_000_000
    assert_nothing_left(town, laptop)
    for checkpoint in list_checkpoints(laptop.output / "checkpoints"):
        verify_checkpoint(checkpoint)
