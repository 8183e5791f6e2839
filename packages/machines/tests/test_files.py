"""What hosts without a shared disk fetch from each other: all of it, once, checked, whatever breaks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import socket
import threading
import time

import numpy as np
import pytest

from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError
from buckeye.transport.batches import (
    Batch,
    Sample,
    batch_directory,
    batches_end,
    end_batches,
    read_batch,
    remove_batch,
    write_batch,
)
from buckeye.transport.weights import newest_weights, publish_weights, verify_weights
from buckeye_machines.engines import files_client, files_server
from buckeye_machines.engines.files_client import Follower, LineSender, LostError, Source, fetch
from buckeye_machines.engines.files_server import Files, FileServer

ME = RunIdentity(run_id="run", attempt=1)
KEY = "the-key-of-this-run"
HERE = "127.0.0.1"


@pytest.fixture
def there(tmp_path):
    """The directory of node 0."""
    root = tmp_path / "there"
    root.mkdir()
    (root / "run.json").write_text(json.dumps({"run_id": "run", "attempt": 1, "attempts": []}))
    return root


@pytest.fixture
def here(tmp_path):
    root = tmp_path / "here"
    root.mkdir()
    return root


@pytest.fixture
def server(there):
    server = FileServer(Files(there), address=HERE, key=KEY)
    yield server
    server.close()


def source(server, **words):
    return Source(HERE, server.port, KEY, **words)


def follower(server, here, *folders):
    return Follower(source(server), here, folders)


def look(one, times=4):
    """Until nothing is missing."""
    for _ in range(times):
        if not one.look():
            return


def publish(root, step, content=b"w" * 300_000, attempt=1):
    def fill(directory):
        (directory / "model.safetensors").write_bytes(content)
        (directory / "config.json").write_text("{}")

    identity = RunIdentity(run_id="run", attempt=attempt)
    return publish_weights(root / "weights", step, fill, identity=identity, dtype="float32")


def batch(step, value=1):
    sample = Sample(
        token_ids=np.full(5, value, np.int32),
        loss_mask=np.array([False, True, True, True, True]),
        logprobs=np.zeros(5, np.float32),
        versions=np.array([-1, 0, 0, 0, 0], np.int32),
        advantages=np.ones(5, np.float32),
        temperature=1.0,
    )
    return Batch(step=step, samples=(sample,), orchestrator_state={"of": step})


def steps(root, folder):
    return sorted(path.name for path in (root / folder).iterdir() if path.name.startswith("step_"))


def test_weights_come_as_they_were_published_and_old_ones_go(server, there, here):
    one = follower(server, here, "weights")
    for step in (3, 4):
        publish(there, step, bytes([step]) * 200_000)
    look(one)
    assert newest_weights(here / "weights", identity=ME) == (4, here / "weights" / "step_4")
    assert verify_weights(here / "weights" / "step_4") == verify_weights(there / "weights" / "step_4")
    remove = there / "weights" / "step_3"
    os.rename(remove, there / "gone")
    publish(there, 5)
    look(one)
    assert steps(here, "weights") == ["step_4", "step_5"]
    assert not list((here / "weights").glob(".*"))


def test_the_newest_weights_come_first(server, there, here):
    for step in (1, 2, 3):
        publish(there, step)
    one = follower(server, here, "weights")
    one.look()
    assert steps(here, "weights") == ["step_3"]


def test_weights_of_a_later_attempt_replace_those_of_the_same_step(server, there, here):
    one = follower(server, here, "weights")
    publish(there, 2, b"a" * 100)
    look(one)
    publish(there, 2, b"b" * 100, attempt=2)
    look(one)
    assert verify_weights(here / "weights" / "step_2").attempt == 2


def test_weights_of_other_runs_stay(server, there, here):
    def fill(directory):
        (directory / "model.safetensors").write_bytes(b"x")

    other = RunIdentity(run_id="other", attempt=1)
    publish_weights(here / "weights", 9, fill, identity=other, dtype="float32")
    publish(there, 1)
    look(follower(server, here, "weights"))
    assert steps(here, "weights") == ["step_1", "step_9"]


def test_a_batch_is_handed_over_once_and_goes_there_when_it_was_trained(server, there, here):
    one = follower(server, here, "batches")
    write_batch(there / "batches", batch(0), identity=ME)
    look(one)
    got = read_batch(here / "batches", 0, identity=ME)
    assert got is not None
    assert got.orchestrator_state == {"of": 0}
    publish(here, 1)
    remove_batch(here / "batches", 0)  # as the trainer does, after it has published
    look(one)
    assert batch_directory(there / "batches", 0).exists()  # node 0 has not what came of it
    trainer = FileServer(Files(here), address=HERE, key=KEY)
    look(follower(trainer, there, "weights"))
    trainer.close()
    look(one)
    assert not batch_directory(there / "batches", 0).exists()
    look(one)
    assert not batch_directory(here / "batches", 0).exists()


def test_a_batch_that_is_set_aside_is_written_again_and_comes_again(server, there, here):
    one = follower(server, here, "batches")
    write_batch(there / "batches", batch(7), identity=ME)
    look(one)
    remove_batch(here / "batches", 7)  # damaged: there are no weights after it
    look(one)
    assert not batch_directory(there / "batches", 7).exists()  # which the orchestrator sees
    write_batch(there / "batches", batch(7), identity=ME)
    look(one)
    assert read_batch(here / "batches", 7, identity=ME) is not None


def test_a_trainer_that_is_started_anew_asks_again(server, there, here):
    write_batch(there / "batches", batch(0), identity=ME)
    look(follower(server, here, "batches"))
    again = RunIdentity(run_id="run", attempt=2)
    write_batch(there / "batches", batch(0, value=2), identity=again)
    look(follower(server, here, "batches"))
    assert read_batch(here / "batches", 0, identity=ME) is None
    got = read_batch(here / "batches", 0, identity=again)
    assert got is not None
    assert got.samples[0].token_ids.tolist() == [2] * 5


def test_the_end_of_batches_is_told_and_taken_back(server, there, here):
    one = follower(server, here, "batches")
    end_batches(there / "batches", 4, identity=ME)
    (here / "batches").mkdir()
    look(one)
    assert batches_end(here / "batches", identity=ME) == 4
    (there / "batches" / "end.json").unlink()
    look(one)
    assert batches_end(here / "batches", identity=ME) is None


def test_what_is_deleted_there_goes_here_unless_it_was_here_before_or_is_read(tmp_path, there, here):
    folders = ("checkpoints",)
    server = FileServer(Files(there, folders), address=HERE, key=KEY)
    for root, step in ((here, 1), (there, 2), (there, 3), (there, 4)):
        folder = root / "checkpoints" / f"step_{step}" / "trainer"
        folder.mkdir(parents=True)
        (folder / "state").write_text(str(step))
    one = follower(server, here, *folders)
    look(one, times=5)
    assert steps(here, "checkpoints") == ["step_1", "step_2", "step_3", "step_4"]
    for step in (2, 3):
        (there / "checkpoints" / f"step_{step}").rename(tmp_path / str(step))
    handle = os.open(here / "checkpoints" / "step_3", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as who uploads it does
    look(one)
    assert steps(here, "checkpoints") == ["step_1", "step_3", "step_4"]
    os.close(handle)
    look(one)
    assert steps(here, "checkpoints") == ["step_1", "step_4"]
    server.close()


def test_a_wrong_key_is_refused_by_every_route(server, there, here):
    publish(there, 1)
    stranger = Source(HERE, server.port, "wrong")
    for ask in (
        lambda: stranger.index(),
        lambda: stranger.listing("weights", "1"),
        lambda: stranger.post("/done", {"step": 0, "id": ""}),
        lambda: stranger.post("/lines", {"file": "metrics.jsonl", "lines": ["x"]}),
        lambda: stranger.post("/source", {"port": 1}),
        lambda: fetch(stranger, "weights", "1", here / "step_1"),
    ):
        with pytest.raises(TransportError, match="401"):
            ask()
    assert not (there / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "path",
    [
        "/trees/weights/..",
        "/trees/weights/1/../../run.json",
        "/trees/weights/1/..%2F..%2Frun.json",
        "/trees/checkpoints/1",
        "/trees/weights/-1",
        "/trees/weights/%C2%B2",
        "/trees/model/now",
        "/run.json",
    ],
)
def test_nothing_else_is_served(server, there, path):
    publish(there, 1)
    with pytest.raises(TransportError, match=r"\(40[04]\)"):
        source(server)._ask("GET", path)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/lines", {"file": "../x", "lines": []}, 400),
        ("/lines", {"file": "metrics.jsonl", "lines": ["a\nb"]}, 400),
        ("/lines", {"file": "metrics.jsonl", "lines": "a"}, 400),
        ("/lines", {"file": "metrics.jsonl", "lines": ["x" * 2**22]}, 413),
        ("/done", {"step": "x", "id": ""}, 400),
        ("/source", {"port": 1}, 404),
    ],
)
def test_what_is_not_understood_is_refused(server, there, path, body, status):
    with pytest.raises(TransportError, match=rf"\({status}\)"):
        source(server).post(path, body)
    assert sorted(path.name for path in there.iterdir()) == ["run.json"]


class Relay:
    """Between two hosts: passes on, but breaks off after so many bytes of answers, or changes one."""

    def __init__(self, port, *, after=(), spoil=False, slow=0.0):
        self.listener = socket.create_server((HERE, 0))
        self.port = self.listener.getsockname()[1]
        self._target, self._after, self._spoil, self._slow = port, list(after), spoil, slow
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            limit = self._after.pop(0) if self._after else None
            server = socket.create_connection((HERE, self._target))
            threading.Thread(target=self._pass, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, limit), daemon=True).start()

    def _pass(self, one, other, limit):
        passed = 0
        try:
            while data := one.recv(65536):
                if self._spoil and limit is None and b"wwwwwwww" in data:
                    data = data.replace(b"wwwwwwww", b"wwwwXwww", 1)
                    self._spoil = False
                if limit is not None and passed + len(data) > limit:
                    other.sendall(data[: limit - passed])
                    break
                other.sendall(data)
                passed += len(data)
                time.sleep(self._slow)
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()


@pytest.fixture
def relay(server):
    relays = []

    def make(**words):
        relays.append(Relay(server.port, **words))
        return Source(HERE, relays[-1].port, KEY), relays[-1]

    yield make
    for one in relays:
        one.close()


def test_a_transfer_that_breaks_off_goes_on_where_it_was(relay, there, here):
    publish(there, 1, os.urandom(2_000_000))
    asked = []
    through, _ = relay(after=[1_500_000])
    part = through.part
    through.part = lambda path, start, *rest: (asked.append((path, start)), part(path, start, *rest))[1]
    final = here / "weights" / "step_1"
    with pytest.raises(LostError):
        fetch(through, "weights", "1", final)
    assert not final.exists()
    fetch(through, "weights", "1", final)
    verify_weights(final)
    starts = [start for path, start in asked if "model.safetensors" in path]
    assert starts[0] == 0
    assert starts[1] > 1_000_000


def test_a_process_that_was_killed_goes_on_where_another_was(relay, there, here):
    publish(there, 1, os.urandom(2_000_000))
    final = here / "weights" / "step_1"
    with pytest.raises(LostError):
        fetch(relay(after=[1_500_000])[0], "weights", "1", final)
    left = list((here / "weights").glob(".incoming-*/model.safetensors"))
    assert left[0].stat().st_size > 1_000_000
    fetch(relay()[0], "weights", "1", final)
    verify_weights(final)
    assert not list((here / "weights").glob(".*"))


def test_a_byte_that_changed_on_the_way_is_noticed_and_fetched_again(relay, there, here):
    publish(there, 1)
    through, _ = relay(spoil=True)
    fetch(through, "weights", "1", here / "weights" / "step_1")
    verify_weights(here / "weights" / "step_1")


def test_what_is_damaged_there_comes_as_it_is_and_its_reader_says_so(server, there, here):
    publish(there, 1)
    path = there / "weights" / "step_1" / "model.safetensors"
    path.write_bytes(b"z" * path.stat().st_size)
    fetch(source(server), "weights", "1", here / "weights" / "step_1")
    with pytest.raises(TransportError, match="SHA-256 differs"):
        verify_weights(here / "weights" / "step_1")


def test_a_step_that_is_replaced_meanwhile_is_not_mixed(server, there, here, monkeypatch):
    publish(there, 1, b"a" * 100_000)
    ask = source(server)
    listing = ask.listing("weights", "1")
    publish(there, 1, b"b" * 100_000, attempt=2)
    monkeypatch.setattr(ask, "listing", lambda *_: listing)
    with pytest.raises(files_client.GoneError):
        fetch(ask, "weights", "1", here / "weights" / "step_1")
    look(follower(server, here, "weights"))
    assert verify_weights(here / "weights" / "step_1").attempt == 2


def test_a_server_that_is_started_again_is_asked_again(there, here):
    first = FileServer(Files(there), address=HERE, key=KEY)
    one = Follower(source(first), here, ("weights",))
    one.start()
    publish(there, 1)
    wait(lambda: (here / "weights" / "step_1").exists())
    first.close()
    publish(there, 2)
    second = FileServer(Files(there), address=HERE, key=KEY)
    one.close()
    another = Follower(source(second), here, ("weights",))
    another.start()
    wait(lambda: (here / "weights" / "step_2").exists())
    another.close()
    second.close()


def wait(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_reads_slowly_holds_up_nobody(server, there, here, monkeypatch):
    monkeypatch.setattr(files_server, "_STALL_SECONDS", 0.5)
    publish(there, 1, os.urandom(30_000_000))
    listing = source(server).listing("weights", "1")
    lazy = http.client.HTTPConnection(HERE, server.port)
    lazy.request(
        "GET",
        f"/trees/weights/1/model.safetensors?id={listing.id}",
        headers={"Authorization": f"Bearer {KEY}", "Range": "bytes=0-29999999"},
    )
    answer = lazy.getresponse()
    assert answer.status == 206
    fetch(source(server), "weights", "1", here / "weights" / "step_1")
    verify_weights(here / "weights" / "step_1")
    time.sleep(1.5)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    lazy.close()


def test_a_full_disk_is_waited_for_before_anything_is_asked(server, there, here, monkeypatch):
    publish(there, 1)
    free = {"bytes": 1000}
    monkeypatch.setattr("buckeye.base.disk.free_bytes", lambda path: free["bytes"])
    monkeypatch.setattr("buckeye.base.disk._POLL_SECONDS", 0.02)
    monkeypatch.setenv("BUCKEYE_DISK_RESERVE", "0")
    done = threading.Thread(
        target=fetch, args=(source(server), "weights", "1", here / "weights" / "step_1"), daemon=True
    )
    done.start()
    time.sleep(0.2)
    assert not list((here / "weights").iterdir())
    free["bytes"] = 10**9
    done.join(30)
    verify_weights(here / "weights" / "step_1")


def test_lines_arrive_once_whoever_sends_them_again(server, there, here):
    (there / "metrics.jsonl").write_text('{"of": "node 0"}\n')
    own = here / "metrics.jsonl"
    own.write_text('{"step": 0}\n{"step": 1}\n{"half')
    sender = LineSender(source(server), here)
    sender.send()
    with own.open("a") as file:
        file.write('": 2}\n')
    sender.send()
    LineSender(source(server), here).send()  # a process that was started again begins at the beginning
    assert (there / "metrics.jsonl").read_text().splitlines() == [
        '{"of": "node 0"}',
        '{"step": 0}',
        '{"step": 1}',
        '{"half": 2}',
    ]


def test_lines_are_kept_apart_by_file_and_sent_in_pieces(server, there, here, monkeypatch):
    monkeypatch.setattr(files_client, "_MOST_LINES_BYTES", 100)
    (here / "logs").mkdir()
    (here / "logs" / "run.log").write_text("".join(f"line {n} of the log\n" for n in range(50)))
    LineSender(source(server), here).send()
    assert (there / "logs" / "run.log").read_text() == (here / "logs" / "run.log").read_text()
    assert not (there / "metrics.jsonl").exists()


def test_lines_of_a_server_that_was_started_again_are_known(there, here):
    (here / "metrics.jsonl").write_text('{"step": 0}\n')
    for _ in range(2):
        server = FileServer(Files(there), address=HERE, key=KEY)
        LineSender(source(server), here).send()
        server.close()
    assert (there / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_listing_of_another_name_than_of_a_file_is_refused(server, there, monkeypatch):
    ask = source(server)
    bad = {"id": "x", "files": [{"name": "../x", "size": 1, "mtime": 0, "sha256": ""}]}
    monkeypatch.setattr(ask, "_ask", lambda *_, **__: json.dumps(bad).encode())
    with pytest.raises(TransportError, match="names a file that is none"):
        ask.listing("weights", "1")


def test_a_model_is_fetched_with_its_folders(tmp_path, there, here):
    model = tmp_path / "model"
    (model / "more").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "more" / "w.safetensors").write_bytes(b"w" * 100)
    server = FileServer(Files(there, model=model), address=HERE, key=KEY)
    fetch(source(server), "model", "now", here / "deep" / "model")
    assert (here / "deep" / "model" / "more" / "w.safetensors").read_bytes() == b"w" * 100
    server.close()


def test_the_id_follows_what_is_there(tmp_path):
    (tmp_path / "a").write_text("1")
    before = files_server.tree_id(tmp_path)
    (tmp_path / "a").write_text("12")
    assert files_server.tree_id(tmp_path) != before
    assert hashlib.sha256(b"").hexdigest() != before
