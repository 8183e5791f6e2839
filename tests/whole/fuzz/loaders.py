"""All inputs that Buckeye reads and others may have written, each with a valid example and its reader.

A loader receives a folder in which one file is damaged. It raises a BuckeyeError, or another error that its
caller handles (`refusals`); any other exception is a defect. The valid examples are in `seeds/`, or made by
Buckeye.
"""

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx
import msgspec
import numpy as np
import torch
from safetensors.torch import save
from tests.command import run_here
from tests.remote.landlord import FakeTime
from tests.run.made_runs import made_run, write_metrics
from tests.workers.proxy.test_wire_malformed import post

from buckeye.base.dotenv import read_dotenv
from buckeye.base.prime_account import PrimeAccount, prime_account
from buckeye.base.process import RunIdentity
from buckeye.chat import openai_api
from buckeye.config.inference import InferenceConfig
from buckeye.config.load import load_config
from buckeye.config.losses import CustomLossConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.envs.stdlib_only.outcomes import OutcomeError, checked_outcome
from buckeye.errors import BuckeyeError, UsageError
from buckeye.evaluation import rows as evaluation_rows
from buckeye.evaluation.certify import certificate
from buckeye.evaluation.certify.identity import changes
from buckeye.evaluation.figures import compute_figures
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.architecture import read_spec, tensor_shapes
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights, auto_dtype
from buckeye.inference.render import ChatRenderer
from buckeye.inference.render.call_format import CallFormat
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.launch.preflight.model_checks import check_template
from buckeye.launch.preflight.model_files import check_model_files, check_tokenizer_files, missing_files
from buckeye.launch.preflight.model_shape import read_shape
from buckeye.mcp.actions import parser
from buckeye.mcp.config import ParserConfig, load_gym_config
from buckeye.mcp.gateway import json_rpc as gateway
from buckeye.mcp.images.manifest import parse_manifest, parse_reference
from buckeye.mcp.images.registry import find_login
from buckeye.mcp.images.unpack import unpack_layers
from buckeye.mcp.tasks.dataset import read_splits
from buckeye.mcp.tasks.dataset_rows import as_row, read_with_lock, split_tasks
from buckeye.mcp.tasks.lock_file import parse_image, read_lock
from buckeye.mcp.tasks.task_files import read_rows
from buckeye.mcp.tasks.variables import find_server_variables, find_variable_names, resolve_variables
from buckeye.remote.connection import known_keys, parse_target
from buckeye.remote.control import terminal_command
from buckeye.remote.ledger import Ledger
from buckeye.remote.offers import offer_table
from buckeye.remote.providers import prime, prime_api
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.run_files.known_runs import RemoteJob, RemoteRun, write_remote_run
from buckeye.runs.checkpoint_facts import read_config
from buckeye.runs.status import find_checkpoint, run_status
from buckeye.runs.stop import continuation
from buckeye.trainer.data.chat_data import ChatFile, ChatFormat
from buckeye.trainer.losses.policy_gradient import load_custom_loss
from buckeye.trainer.model.adapter_files import check_adapter_base
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.transport import batches, checkpoint
from buckeye.transport.restart_requests import take_restart_requests
from buckeye.transport.weights import newest_weights, publish_weights, verify_weights
from buckeye.workers.installed import lock_file, record
from buckeye.workers.worker_side.frames import FrameError, decode

SEEDS = Path(__file__).with_name("seeds")
CPU = torch.device("cpu")
RUN = RunIdentity(run_id="r", attempt=1)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Reader `load(folder)` of the files that `prepare(folder)` makes.

    The file `spoilt` is damaged; its `kind` is one that `mutations.spoilt` accepts.
    """

    spoilt: str
    kind: str
    load: Callable[[Path], object]
    prepare: Callable[[Path], None]
    refusals: tuple[type[BaseException], ...] = ()


class RefusedError(BuckeyeError):
    """Failure of a command with a single message."""


def _file(name, kind, load, *refusals, seed=None, further=()):
    """Return the loader of one file, copied from a seed.

    `further` maps names of further files to their seeds.
    """
    files = {**dict(further), name: seed or name}

    def prepare(folder):
        for path, source in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SEEDS / source, folder / path)

    return Loader(
        spoilt=name, kind=kind, load=lambda folder: load(folder / name), prepare=prepare, refusals=refusals
    )


def _part(prepare, load, name, kind="json", refusals=()):
    """Return the loader of one file in a folder made by Buckeye; `load` receives the folder."""
    return Loader(spoilt=name, kind=kind, load=load, prepare=prepare, refusals=refusals)


def _seed(name):
    return json.loads((SEEDS / name).read_bytes())


def _json(path):
    return json.loads(path.read_bytes())


def _text(path):
    return path.read_bytes().decode("utf-8", "replace")


def _command(*words):
    """Return the loader of a command that succeeds or fails with one message, without "unexpected"."""

    def run(folder):
        variables = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
        done = run_here(*words, cwd=folder, env=variables | {"BUCKEYE_HOME": str(folder / "home")})
        said = done.stdout + done.stderr
        assert "error: unexpected " not in done.stderr, done.stderr[-2000:]
        assert "Traceback" not in said, said[-4000:]
        if done.returncode:
            assert done.stderr.startswith(("error: ", "usage: ")) or "\nerror: " in done.stderr, said[-2000:]
            raise RefusedError(done.stderr)

    return run


def _toml(kind, seed):
    return _file("c.toml", "toml", lambda path: load_config(kind, ["@", str(path)]), seed=seed)


def _flags(path):
    with chdir(path.parent):
        return load_config(RLConfig, path.read_bytes().decode("utf-8", "surrogateescape").split("\n"))


def _tasks(path):
    lock = path.with_name("lock.yaml")
    tasks, _ = read_with_lock(path, read_lock(lock) if lock.exists() else None)
    split_tasks(tasks, 0.3 if not any(task.metadata.get("split") for task in tasks) else None)
    return [as_row(task) for task in tasks], find_server_variables(tasks)


def _dataset(path):
    return read_splits(path.parent)


def _variables(path):
    value = _json(path)
    return resolve_variables(value, {"A": "1"}), find_variable_names(value)


# --- models ---


@cache
def _model():
    with tempfile.TemporaryDirectory() as scratch:
        size = TinySize(vocab_size=300, layers=1, hidden=64, max_length=128)
        make_tiny_model(Path(scratch, "tiny"), texts=["a b c"] * 4, size=size, seed=0)
        files = {path.name: path.read_bytes() for path in Path(scratch, "tiny").iterdir()}
    usual = {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"eos_token_id": [1]}'}
    return usual | files


def _put_model(folder):
    for name, content in _model().items():
        (folder / name).write_bytes(content)


def _put_indexed(folder):
    _put_model(folder)
    weights = dict.fromkeys(tensor_shapes(folder), "model.safetensors")
    index = {"metadata": {"total_size": 5}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _put_adapter(folder):
    _put_model(folder)
    (folder / "adapter").mkdir(exist_ok=True)
    shutil.copy(SEEDS / "adapter_config.json", folder / "adapter")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 64), f"{name}.lora_B.weight": torch.zeros(64, 2)}
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(save(tensors))


def _engine(folder):
    """Read a model directory as the embedded engine, the renderer and the checks before a start do."""
    check_template(folder), missing_files(folder), read_shape(folder)
    check_model_files(folder, "engine"), check_tokenizer_files(folder)
    spec, files = read_spec(folder), Checkpoint(folder)
    weights = DecoderWeights(spec, dtype=auto_dtype(files, CPU), device=CPU)
    weights.check(files)
    weights.load(files)


def _trained_model(folder):
    return load_policy(str(folder), CPU)


def _renderer(folder):
    renderer = ChatRenderer(folder)
    user, assistant = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "b"}
    for messages in ([user], [user, assistant]):
        conversation = renderer.render(messages, _seed("chat.json")["tools"])
        renderer.parse(conversation, conversation.ids[:3])


def _adapter(folder):
    AdaptedCheckpoint(folder, folder / "adapter")
    check_adapter_base(folder / "adapter", str(folder))


# --- files between the processes of a run ---


def _put_checkpoint(folder):
    def fill(directory):
        (directory / "model.safetensors").write_bytes(b"m")
        return {}

    if not (root := folder / "checkpoints").exists():
        checkpoint.save_checkpoint(root, 4, fill, orchestrator_state={"step": 4}, identity=RUN)


def _checkpoint(folder):
    root = folder / "checkpoints"
    checkpoint.list_checkpoints(root), checkpoint.checkpoints_oldest_first(root)
    checkpoint.find_usable_checkpoint(root, -1, checkpoint.verify_checkpoint)
    info = checkpoint.resolve_checkpoint(root, -1)
    checkpoint.verify_checkpoint(info)
    return checkpoint.read_orchestrator_state(info)


def _put_weights(folder):
    def fill(directory):
        (directory / "model.safetensors").write_bytes(b"m")

    if not (folder / "weights").exists():
        publish_weights(folder / "weights", 3, fill, identity=RUN, dtype="float32")


def _weights(folder):
    newest_weights(folder / "weights", identity=RUN)
    return verify_weights(folder / "weights" / "step_3")


def _put_batch(folder):
    if (root := folder / "batches").exists():
        return
    ids = np.arange(3, dtype=np.int32)
    numbers = dict.fromkeys(("logprobs", "advantages"), ids.astype(np.float32))
    sample = batches.Sample(token_ids=ids, loss_mask=ids > 0, versions=ids, temperature=1.0, **numbers)
    batch = batches.Batch(step=2, samples=(sample,) * 2, orchestrator_state={})
    batches.write_batch(root, batch, identity=RUN)


def _batch(folder):
    root = folder / "batches"
    return batches.read_batch(root, 2, identity=RUN)


def _put_run(folder):
    if (folder / "run").exists():
        return
    run = made_run(folder / "run", checkpoints=(2,), max_steps=4)
    for step in range(4):
        orchestrator = ("orchestrator", step, step, {"reward/mean": 0.5, "attempt": 1})
        write_metrics(run, orchestrator, ("trainer", step, step, {"loss": 0.1, "attempt": 1}))
    shutil.copytree(SEEDS / "run", run, dirs_exist_ok=True)


def _put_remote_run(folder):
    _put_run(folder)
    there = dict.fromkeys(RemoteJob.__struct_fields__, "x") | {"target": "root@1.2.3.4:22", "sent": ["a"]}
    job = msgspec.convert(there, RemoteJob)
    away = RemoteRun(run_id="aaaa1111", state="running", started=1.7e9, said=1.7e9, doing="trains", job=job)
    write_remote_run(folder / "run", away)


def _run(folder):
    run = folder / "run"
    read_config(run)
    find_checkpoint(run, "best")
    continuation(run, [])
    return run_status(run)


def _certificate(path):
    found = certificate.read_certificate(path)
    current = {"package": {"files": {}, "version": None}, "tasks": {}}
    return certificate.renewal_command(found, path), changes(found, current)


def _evaluations(folder):
    return checkpoint.read_scores(folder / "run")


def _evaluated(path):
    rows = list(evaluation_rows.read_rows(path).values())
    return compute_figures(rows, rollouts_per_task=1, pass_reward=1.0) if rows else None


# --- answers of providers, registries and clients ---


def _ledger(path):
    ledger = Ledger()
    ledger.folder = path.parent
    return ledger.entries(), ledger.read("p").cost(2e9)


def _from_provider(path, ask):
    body, fake = path.read_bytes(), FakeTime()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    account = PrimeAccount(api_key="k", url="http://p", team_id=None, ssh_key_path=None)
    time = SimpleNamespace(time=fake.now, monotonic=fake.now, sleep=fake.sleep)
    with mock.patch.object(prime, "time", time), mock.patch.object(prime_api, "time", time):
        return ask(PrimeProvider(account, transport=transport))


def _offers(path):
    request = GpuSpec(count=2, type="A100_80GB")
    return offer_table(_from_provider(path, lambda provider: provider.offers(request, disk_gb=100)))


def _hosts(path):
    return known_keys(path, parse_target("root@1.2.3.4:2222"))


def _prime_file(path):
    with mock.patch.dict(os.environ, {"HOME": str(path.parents[1])}):
        return prime_account()


def _login(path):
    with mock.patch.dict(os.environ, {"DOCKER_CONFIG": str(path.parent), "HOME": str(path.parent)}):
        return find_login("ghcr.io")


def _manifest(path):
    try:
        content = _json(path)
    except (ValueError, RecursionError) as error:
        raise UsageError(str(error)) from None  # as the registry's client does
    if not isinstance(content, dict):
        raise UsageError("no object")
    return parse_manifest(content, digest="sha256:" + "3" * 64, name="my-env")


def _layers(path):
    content = path.read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with tempfile.TemporaryDirectory() as scratch:
        layer, root = Path(scratch, "layer"), Path(scratch, "root")
        layer.write_bytes(gzip.compress(content, mtime=0))
        root.mkdir()
        try:
            return unpack_layers([layer], [digest], root, owner=None)
        finally:
            assert not (Path(scratch).parent / "etc").exists()
            shutil.rmtree(root, ignore_errors=True)


def _image_name(path):
    parse_image(_text(path))
    return parse_reference(_text(path))


def _openai(kind, seed):
    parse = partial(openai_api.parse_request, kind=kind)
    return _file("body", "json", lambda path: parse(path.read_bytes()), seed=seed)


def _wire(route, seed):
    def load(path):
        status, body, _ = post(route, path.read_bytes())
        assert status < 500, body
        if status >= 400:
            assert json.loads(body)["error"], body
            raise RefusedError(body.decode())

    return _file("body", "json", load, seed=seed)


def _worker_message(path):
    return checked_outcome(decode(path.read_bytes()).get("outcome"))


def _gateway_message(path):
    gateway.read_line(path.read_bytes())
    gateway.parse_message(path.read_bytes())
    return gateway.one_line(path.read_bytes())


@cache
def _chat_format():
    folder = Path(tempfile.mkdtemp())
    _put_model(folder)
    return ChatFormat(str(folder))


def _copied(load, levels=0):
    """Load a copy of the folder, for files that are read once or cached by name."""

    def load_copy(path):
        with tempfile.TemporaryDirectory() as scratch:
            return load(shutil.copytree(path.parents[levels], Path(scratch, "copy")))

    return load_copy


def _loss(folder):
    return load_custom_loss(CustomLossConfig(import_path=f"{folder / 'loss.py'}:loss", kwargs={"low": 0.1}))


def _replies(path):
    text = _text(path)
    for form in ("json", "xml", "python", "named"):
        for marker in ("", "<tool_call>"):
            CallFormat(form=form, open=marker, close="", lead="", rest="").parse(text, [])
    call = {"id": "a", "function": {"name": "move", "arguments": text}}
    reply = {"role": "assistant", "content": text, "tool_calls": [call]}
    parser.parse_tool_calls(reply, ParserConfig(format="tools"), ["move"])
    return parser.parse_reply(text, ParserConfig(), ["move", "done"])


VALUES = (ValueError, RecursionError)
MODEL, ADAPTER = partial(_part, _put_model), partial(_part, _put_adapter, _adapter)
CHECKPOINT = partial(_part, _put_checkpoint, _checkpoint)
BATCH = partial(_part, _put_batch, _batch, refusals=(ValueError,))
OF_RUN = partial(_part, _put_run)
STATUS = _command("rl", "status", "run")

LOADERS: dict[str, Loader] = {
    "rl.toml": _toml(RLConfig, "rl.toml"),
    "trainer.toml": _toml(TrainerConfig, "trainer.toml"),
    "orchestrator.toml": _toml(OrchestratorConfig, "orchestrator.toml"),
    "inference.toml": _toml(InferenceConfig, "inference.toml"),
    "sft.toml": _toml(SFTConfig, "sft.toml"),
    "flags": _file(
        "flags", "text", _flags, further={"train.toml": "trainer.toml", "orch.toml": "orchestrator.toml"}
    ),
    "gym file": _file("gym.yaml", "yaml", lambda path: load_gym_config(path).actions),
    "lock": _file("lock.yaml", "yaml", lambda path: read_lock(path).image_name),
    "requirements.lock": _file(
        "requirements.lock", "text", lambda path: lock_file.read_lock(path).without("numpy")
    ),
    "tasks JSON": _file("tasks.json", "json", _tasks),
    "tasks JSONL": _file("tasks.jsonl", "lines", _tasks),
    "tasks with a lock": _file(
        "lock.yaml",
        "yaml",
        lambda path: _tasks(path.with_name("tasks.json")),
        further={"tasks.json": "tasks_without_servers.json"},
    ),
    "dataset rows": _file(
        "rows.json",
        "json",
        lambda path: read_rows((row for row in _json(path) if isinstance(row, dict)), "the dataset"),
        *VALUES,
    ),
    "dataset parquet": _file("data/train.parquet", "binary", _dataset, seed="train.parquet"),
    ".env": _file(".env", "text", read_dotenv, seed="dotenv"),
    "variables": _file("variables.json", "json", _variables, *VALUES),
    "config.json, engine": MODEL(_engine, "config.json"),
    "config.json, trainer": MODEL(_trained_model, "config.json"),
    "generation_config.json": MODEL(
        lambda folder: (_renderer(folder), _engine(folder)), "generation_config.json"
    ),
    "tokenizer.json": MODEL(_renderer, "tokenizer.json"),
    "tokenizer_config.json": MODEL(_renderer, "tokenizer_config.json"),
    "chat template": MODEL(_renderer, "chat_template.jinja", "text"),
    "model.safetensors": MODEL(_engine, "model.safetensors", "safetensors"),
    "model.safetensors, trainer": MODEL(_trained_model, "model.safetensors", "safetensors"),
    "safetensors index": _part(_put_indexed, _engine, "model.safetensors.index.json"),
    "adapter_config.json": ADAPTER("adapter/adapter_config.json"),
    "adapter_model.safetensors": ADAPTER("adapter/adapter_model.safetensors", "safetensors"),
    "COMMITTED": CHECKPOINT("checkpoints/step_4/COMMITTED"),
    "orchestrator state": CHECKPOINT("checkpoints/step_4/orchestrator/state.json"),
    "weights manifest": _part(_put_weights, _weights, "weights/step_3/manifest.json"),
    "batch manifest": BATCH("batches/step_2/manifest.json"),
    "batch header": BATCH("batches/step_2/header.msgpack", "binary"),
    "batch data": BATCH("batches/step_2/batch.safetensors", "safetensors"),
    "run.json": OF_RUN(_run, "run/run.json"),
    "status.json": OF_RUN(_run, "run/status.json"),
    "configs/rl.json": OF_RUN(_run, "run/configs/rl.json"),
    "metrics.jsonl": OF_RUN(_run, "run/metrics.jsonl", "lines"),
    "status.json, rl status": OF_RUN(STATUS, "run/status.json"),
    "metrics.jsonl, rl status": OF_RUN(
        _command("rl", "status", "run", "--json"), "run/metrics.jsonl", "lines"
    ),
    "run.json, rl status": OF_RUN(STATUS, "run/run.json"),
    "events.jsonl, rl logs --events": OF_RUN(
        _command("rl", "logs", "run", "--events"), "run/events.jsonl", "lines"
    ),
    "run.log, rl logs": OF_RUN(_command("rl", "logs", "run"), "run/logs/run.log", "text"),
    "evals JSON": OF_RUN(_evaluations, "run/evals/step_2/words.json"),
    "evals JSONL": OF_RUN(_evaluations, "run/evals/step_2/words.jsonl", "lines"),
    "remote.json": _part(_put_remote_run, lambda folder: terminal_command(folder / "run"), "run/remote.json"),
    "remote.json, rl status": _part(_put_remote_run, STATUS, "run/remote.json"),
    "eval rows": _file("rollouts.jsonl", "lines", _evaluated),
    "certificate": _file("certificate.json", "json", _certificate),
    "ledger": _file("p.json", "json", _ledger, seed="ledger.json"),
    "offers": _file("offers.json", "json", _offers),
    "pod status": _file("pods.json", "json", lambda path: _from_provider(path, lambda p: p.status("p1"))),
    "known_hosts": _file("known_hosts", "text", _hosts),
    "prime's file": _file(".prime/config.json", "json", _prime_file, seed="prime.json"),
    "image manifest": _file("manifest.json", "json", _manifest),
    "image layer": _file("layer.tar", "binary", _layers),
    "image name": _file("image_name.txt", "text", _image_name),
    "registry login": _file("config.json", "json", _login, seed="registry_login.json"),
    "chat request": _openai(openai_api.ChatRequest, "chat.json"),
    "completion request": _openai(openai_api.CompletionRequest, "completion.json"),
    "generate request": _openai(openai_api.GenerateRequest, "generate.json"),
    "wire chat": _wire("v1/chat/completions", "wire_chat.json"),
    "wire completion": _wire("v1/completions", "wire_completion.json"),
    "wire messages": _wire("v1/messages", "wire_messages.json"),
    "wire responses": _wire("v1/responses", "wire_responses.json"),
    "worker message": _file("worker_message.json", "json", _worker_message, FrameError, OutcomeError),
    "gateway message": _file("gateway_message.json", "json", _gateway_message, gateway.GatewayError),
    "sft chats": _file(
        "chats.jsonl", "lines", lambda path: ChatFile(path, _chat_format(), seed=0, seq_len=64).all()
    ),
    "custom loss": _file("loss.py", "text", _copied(_loss), seed="loss.txt"),
    "replies": _file("reply.txt", "text", _replies),
    "restart requests": _file(
        "restart/1.json", "json", _copied(take_restart_requests, 1), seed="restart.json"
    ),
    "installed environment": _file(
        "env/environment.json", "json", lambda path: record.read_record(path.parent), seed="environment.json"
    ),
}
