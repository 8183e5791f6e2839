"""Hosts that do not share the directory of their run: each has one of its own, under the same path.

Node 0 serves what it has (`files_server`). A process on another node is started by this module, which has
first what the process reads from its disk (settings, the model), and then, beside it, what the run goes on to
bring: batches for the first rank of the trainer, weights for the engines. The first rank serves the weights
that it publishes, and node 0 fetches them. Trainer and engines know nothing of it.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from buckeye.base import heartbeat, storage
from buckeye.base.process import die_with_parent, take_secrets
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, RunError, UsageError
from buckeye.launch.hosts import Facts, Handle, Host, Nodes, Start
from buckeye.run_files.directory import RUN_FILE, files_of_a_run
from buckeye.sizing.model import fetch_model
from buckeye_machines.engines.files_client import Follower, LineSender, LostError, Source, fetch
from buckeye_machines.engines.files_server import OF_NODE_0, OF_THE_TRAINER, Files, FileServer, tree_id

log = logging.getLogger(__name__)

PROBE = ".node-probe"
COPY = "copy_of_run.json"
"""In a node's own directory of a run: which run it is of. All that lies beside it is a copy, or is sent."""

_CHECKPOINTS = "checkpoints"
_PLACE_VARIABLE, _KEY_VARIABLE = "BUCKEYE_FILES", "BUCKEYE_FILES_KEY"
_MODULE = "buckeye_machines.engines.apart"
_SEND_SECONDS = 0.2
_LOST_SECONDS = 120.0
_TELL_SECONDS = 30.0


# What the launcher does.


@contextmanager
def reached(config: RLConfig, nodes: Nodes) -> Iterator[Nodes]:
    """The nodes, as they reach the directory of the run: they share it, or it is brought to them, while the
    block lasts. Raises UsageError where that is not as `cluster.shared_output_dir` says, and where
    checkpoints would have no place that all of them see."""
    output_dir = config.output_dir.absolute()
    blind = _blind(nodes, output_dir)
    wanted = config.cluster.shared_output_dir
    if wanted and blind:
        raise UsageError(
            f"{blind[0]} does not see {output_dir} of this host, and cluster.shared_output_dir = true: mount "
            "it there under the same path, or leave the setting out."
        )
    if wanted is False and len(blind) < len(nodes.hosts):
        raise UsageError(
            f"cluster.shared_output_dir = false, and other nodes see {output_dir} of this host: leave the "
            "setting out, or choose an output_dir on a disk that each node has for itself."
        )
    if not blind:
        log.info("All nodes share %s: batches, weights and checkpoints go by way of it", output_dir)
        yield replace(nodes, another=_another(nodes, lambda host: _seeing(host, output_dir)))
        return
    if len(blind) < len(nodes.hosts):
        raise UsageError(
            f"{', '.join(blind)} does not see {output_dir} of this host, and others do: let all nodes share "
            "it, or none."
        )
    checkpoints = _place_of_checkpoints(config, nodes, blind[0])
    log.info(
        "The nodes do not share %s: batches and weights go over the network, checkpoints %s",
        output_dir,
        f"to {checkpoints}" if checkpoints is not None else "to this node, and to the store",
    )
    with _serving(config, nodes, checkpoints) as apart:
        yield apart


def _blind(nodes: Nodes, folder: Path) -> list[str]:
    """The nodes that do not see what is written into a folder here."""
    content, probe = secrets.token_hex(16), folder / PROBE
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_file(probe, content)
    try:
        return [
            f"node {number} ({host.facts().name})"
            for number, host in sorted(nodes.hosts.items())
            if not host.sees(probe, content)
        ]
    finally:
        probe.unlink(missing_ok=True)


def _another(nodes: Nodes, use: Callable[[Host], Host]) -> Callable[[], Host | None] | None:
    """How one more node is had, if there may be more; each is put to `use`."""
    if (another := nodes.another) is None:
        return None

    def one() -> Host | None:
        host = another()
        return None if host is None else use(host)

    return one


def _seeing(host: Host, folder: Path) -> Host:
    if _blind(Nodes(hosts={0: host}), folder):
        raise UsageError(f"{host.facts().name} does not see {folder} of this host, and the other nodes do.")
    return host


def _place_of_checkpoints(config: RLConfig, nodes: Nodes, first: str) -> Path | None:
    """The directory of the checkpoints, which all nodes see; None if this one has them, and a store."""
    own = config.output_dir.absolute() / _CHECKPOINTS
    place = own if config.cluster.checkpoint_dir is None else config.cluster.checkpoint_dir.absolute()
    blind = [first] if place == own and not own.exists() else _blind(nodes, place)
    if not blind:
        return place
    if place == own and config.trainer.ckpt is not None and config.trainer.ckpt.store is not None:
        return None
    if place == own:
        raise UsageError(
            f"{blind[0]} does not see {own.parent} of this host. Batches and weights can go over the "
            "network; checkpoints need a place that survives: set ckpt.store to an object store, or "
            "set cluster.checkpoint_dir to a directory that all nodes share. Or put output_dir on a file "
            "system that they share, under the same path."
        )
    raise UsageError(
        f"{blind[0]} does not see cluster.checkpoint_dir = {place} of this host: it is to be a directory "
        "that all nodes share, under the same path."
    )


@contextmanager
def _serving(config: RLConfig, nodes: Nodes, checkpoints: Path | None) -> Iterator[Nodes]:
    assert nodes.address is not None
    if config.cluster.on_lost_node == "shrink" and config.cluster.of_trainer[0] != 0:
        raise UsageError(
            "cluster.on_lost_node = shrink needs an output_dir that all nodes share, or the trainer's first "
            "rank on node 0 (cluster.trainer_nodes): batches go to that of the first rank, which may be lost."
        )
    root, key = config.output_dir.absolute(), secrets.token_urlsafe(24)
    model = fetch_model(config.trainer.model.name)
    followers: list[Follower] = []

    def follow(host: str, port: int) -> None:
        for former in followers:
            former.close()
        own = [("checkpoints",)] if checkpoints is None else []  # which no weights should wait for
        followers[:] = [Follower(Source(host, port, key), root, which) for which in [OF_THE_TRAINER, *own]]
        for follower in followers:
            follower.start()

    server = FileServer(
        Files(root, _served(OF_NODE_0, checkpoints), model=model),
        address=nodes.address,
        key=key,
        found=follow,
    )
    first = config.cluster.of_trainer[0]
    place = Place(
        host=nodes.address,
        port=server.port,
        root=str(root),
        model=str(model),
        checkpoints=None if checkpoints is None else str(checkpoints),
        trains=False,
    )
    try:
        yield Nodes(
            address=nodes.address,
            hosts={
                number: ApartHost(host, msgspec.structs.replace(place, trains=number == first), key)
                for number, host in nodes.hosts.items()
            },
            another=_another(nodes, lambda host: ApartHost(host, place, key)),
        )
    finally:
        for follower in followers:
            follower.close()
        server.close()


def _served(folders: tuple[str, ...], checkpoints: Path | str | None) -> tuple[str, ...]:
    return folders if checkpoints is not None else (*folders, _CHECKPOINTS)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a process on another node is told: where node 0 serves, under which paths the directory of the
    run, the model and the checkpoints are (None: they are brought), and whether the first rank of the trainer
    is on its node."""

    host: str
    port: int
    root: str
    model: str
    checkpoints: str | None
    trains: bool


class ApartHost:
    """A node with a disk of its own."""

    def __init__(self, host: Host, place: Place, key: str) -> None:
        self._host, self._place, self._key = host, place, key

    @property
    def absent(self) -> str | None:
        """See `Host`."""
        return self._host.absent

    def facts(self) -> Facts:
        """See `Host`."""
        return self._host.facts()

    def choose_ports(self, count: int) -> list[int]:
        """See `Host`."""
        return self._host.choose_ports(count)

    def sees(self, path: Path, content: str) -> bool:
        """See `Host`."""
        return self._host.sees(path, content)

    def start(self, start: Start) -> Handle:
        """See `Host`. The process is started by `main` below."""
        python, *words = start.argv
        assert words[:2] == ["-m", "buckeye"], words
        env = {
            **start.env,
            _PLACE_VARIABLE: msgspec.json.encode(self._place).decode(),
            _KEY_VARIABLE: self._key,
        }
        argv = [python, "-m", _MODULE, *words[2:]]
        return self._host.start(Start(title=start.title, argv=argv, env=env, stdout=start.stdout))


# What a process on a node does.


def prepare(place: Place, source: Source, run_id: str, kind: str) -> None:
    """Make the node's directory of the run, with what a process of this kind reads when it begins: settings,
    the model, for a trainer the checkpoint that it goes on from. Raises UsageError if something else is in
    the place of the directory."""
    root = Path(place.root)
    root.mkdir(parents=True, exist_ok=True)
    heartbeat.report("this node's copy of the run", on="orchestrator")
    with _alone(root / ".copy.lock"):
        _claim(root, run_id)
        fetch(source, "configs", "now", root / "configs", private=True)  # settings may hold keys
        _have_checkpoint(place, source, root, kind)
        storage.write_file(root / RUN_FILE, json.dumps(source.index().run))
        model = Path(place.model)
        if not (model / "config.json").exists():
            print(f"{model} is not on this node: it is fetched from node 0", flush=True)
            fetch(source, "model", "now", model)


def _have_checkpoint(place: Place, source: Source, root: Path, kind: str) -> None:
    """Let checkpoints be where those of all nodes are, or bring the one that a trainer goes on from."""
    checkpoints = root / _CHECKPOINTS
    if place.checkpoints is not None:
        if Path(place.checkpoints) != checkpoints and not checkpoints.is_symlink():
            checkpoints.symlink_to(place.checkpoints)
        return
    settings = storage.read_json(root / "configs" / f"{kind}.json") if kind == "trainer" else {}
    step = (settings.get("ckpt") or {}).get("resume_step")
    if step is None:
        return
    known, final = source.index().steps[_CHECKPOINTS].get(step), storage.step_directory(checkpoints, step)
    if known is not None and not (final.is_dir() and tree_id(final) == known):
        fetch(source, _CHECKPOINTS, str(step), final)


def _claim(root: Path, run_id: str) -> None:
    """Mark a directory as the copy of a run. Raises UsageError if it is somebody else's."""
    mark = root / COPY
    there = [path for path in files_of_a_run(root) if path.name != _CHECKPOINTS]
    if not mark.exists():
        if there:
            raise UsageError(
                f"{root} on this node holds a run of its own ({there[0].name}), and this one would write "
                "there, too: choose another --output-dir."
            )
    elif storage.read_json(mark)["run_id"] != run_id:
        for path in there:  # copies of what an earlier run had on node 0
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if (root / _CHECKPOINTS).is_symlink():
            (root / _CHECKPOINTS).unlink()
    storage.write_file(mark, json.dumps({"run_id": run_id}))


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let the processes of a node go through one after the other."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Courier:
    """What goes on beside a process: it is brought what the run has for it, and what it says is sent."""

    def __init__(self, place: Place, key: str, words: Sequence[str]) -> None:
        self._place, self._key = place, key
        self._root = Path(place.root)
        self._follower: Follower | None = None
        self._trains = words[0] == "trainer" and os.environ.get("RANK", "0") == "0"
        self._samples = words[0] == "inference" and not place.trains
        self._server: FileServer | None = None
        self._left = _served(("weights",), place.checkpoints)

    def source(self) -> Source:
        """Node 0, for one thread."""
        return Source(self._place.host, self._place.port, self._key)

    def start(self, address: str) -> None:
        """Begin; the first rank of the trainer serves at `address` of this node."""
        threading.Thread(target=self._send, name="lines", daemon=True).start()
        if self._trains:
            files = Files(self._root, _served(OF_THE_TRAINER, self._place.checkpoints))
            self._server = FileServer(files, address=address, key=self._key)
            self.source().post("/source", {"port": self._server.port})
            self._follower = Follower(self.source(), self._root, ("batches", "evals"))
            self._follower.start()
            atexit.register(self.settle)
        elif self._samples:
            threading.Thread(target=self._follow_alone, name="weights", daemon=True).start()

    def settle(self) -> None:
        """Until node 0 has what this process leaves: its last lines, the newest weights, and the newest
        checkpoint if it is brought there."""
        follower = self._follower
        assert follower is not None
        heartbeat.report("the last weights to be fetched", on="orchestrator")
        sender, source = LineSender(self.source(), self._root), self.source()
        answered = told = time.monotonic()
        while True:
            try:
                sender.send()
                theirs = source.index().steps
                if all(_newest(follower.mine(folder), theirs[folder]) for folder in self._left):
                    return
                answered = time.monotonic()
            except BuckeyeError as error:
                if time.monotonic() - answered > _LOST_SECONDS:
                    print(f"error: node 0 has not fetched what this process leaves: {error}", file=sys.stderr)
                    return
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                log.info("Waiting for node 0 to fetch the last weights")
            time.sleep(_SEND_SECONDS)

    def _follow_alone(self) -> None:
        """Of the engines on a node one fetches the weights for all; another takes over if that ends."""
        with _alone(self._root / ".weights.lock"):
            self._follower = Follower(self.source(), self._root, ("weights",))
            self._follower.start()
            threading.Event().wait()

    def _send(self) -> None:
        """Of the processes on a node one sends the lines of all."""
        with _alone(self._root / ".lines.lock"):
            sender = LineSender(self.source(), self._root)
            while True:
                with suppress(LostError):
                    try:
                        sender.send()
                    except BuckeyeError as error:
                        log.warning("Lines for the logs on node 0 were not taken: %s", error)
                        time.sleep(_TELL_SECONDS)
                time.sleep(_SEND_SECONDS)


def _newest(mine: Mapping[int, str], theirs: Mapping[int, str]) -> bool:
    """Whether the newest of my steps, if there is one, is there."""
    return not mine or theirs.get(max(mine)) == mine[max(mine)]


def main() -> None:
    """Be the process of Buckeye that the words say, on a node with a disk of its own."""
    die_with_parent()
    take_secrets()
    heartbeat.start()
    words = sys.argv[1:]
    place = msgspec.json.decode(os.environ.pop(_PLACE_VARIABLE), type=Place)
    from buckeye.cli.errors import run_command
    from buckeye.cli.main import main as buckeye
    from buckeye.sizing.ports import address_towards

    courier = Courier(place, os.environ.pop(_KEY_VARIABLE), words)

    def begin() -> None:
        prepare(place, courier.source(), os.environ["BUCKEYE_RUN_ID"], words[0])
        courier.start(address_towards(place.host))

    try:
        begin()
    except (BuckeyeError, OSError) as error:
        run_command(partial(_refuse, error))
    buckeye()


def _refuse(error: BuckeyeError | OSError) -> None:
    raise error if isinstance(error, BuckeyeError) else RunError(f"This node cannot be used: {error}")


if __name__ == "__main__":
    main()
