"""Everything that Buckeye reads and others may have written: a good example of each, and who reads it.

A loader gets a folder in which one file is spoilt. It refuses with a BuckeyeError, or with the error that is
its own word for "no" and that whoever calls it handles; any other exception is a defect.
"""

import gzip
import io
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import msgspec

from buckeye.errors import BuckeyeError

GYM = b"""job: {name: game, metadata: {environment: "game:latest"}}
system_prompt: |
  You play. {comment} <tool>move(...)</tool>
parser: {use_thinking: true, xml_weight: 0.6, action_weight: 0.4}
action_mappings:
  left:
    _tool: move
    _parser: {positional: [far]}
    direction: left
    far: {from_arg: far, default: 1, transform: "lambda x: x * 2"}
  say: {_tool: talk, text: {from_args: [a, b], defaults: [1, null]}, to: {static: {name: you}}}
rubric: {weights: {task_completion: 0.8, tool_execution: 0.1, format_compliance: 0.1}}
defaults: {max_turns: 10, time_limit: 60}
"""
LOCK = b"""version: 1
image: "my-org/my-env:0.1.0"
digest: "sha256:%s"
tools:
  - name: move
    description: "It moves."
    input_schema: {type: object, properties: {direction: {type: string}}, required: [direction]}
    annotations: {readOnlyHint: false}
built_at: "2026-01-31T12:00:00+00:00"
primary_dataset: {name: my-org/tasks, task_count: 3, updated_at: "2026-01-31T12:00:00+00:00"}
""" % (b"0" * 64)
TRAINER = b"""max_steps = 4
output_dir = "out"
[model]
name = "model"  # a {comment}
[optim]
type = "adamw"
lr = 1e-5
[scheduler]
type = "linear"
warmup = 2
[loss]
type = "ppo"
[ckpt]
interval = 2
[model.experimental.lora]
rank = 8
"""
ORCHESTRATOR = b"""batch_size = 8
rollouts_per_example = 4
seq_len = 256
[sampling]
max_tokens = 64
temperature = 1.0
[[env]]
id = "harleycooper/dakota1890"
args = {seed = 3}
[eval]
interval = 10
[[eval.env]]
id = "harleycooper/dakota1890"
[advantage]
type = "group"
"""
INFERENCE = b"""max_num_seqs = 8
[model]
name = "model"
max_model_len = 256
[server]
port = 8123
[parallel]
dp = 1
"""


def _under(section: str, content: bytes) -> bytes:
    """The settings of a file as a section of another one."""
    return f"[{section}]\n".encode() + re.sub(
        rb"^(\[+)", rb"\1" + section.encode() + b".", content, flags=re.M
    )


RL = (
    b"max_steps = 4\nseq_len = 256\ninference_gpu_ids = [0]\n"
    + _under("trainer", TRAINER.replace(b"max_steps = 4\n", b""))
    + _under("orchestrator", ORCHESTRATOR.replace(b"seq_len = 256\n", b""))
)
SFT = b"""max_steps = 4
[model]
name = "model"
[data]
path = "chats.jsonl"
"""
FLAGS = b"""--trainer
@
train.toml
--orchestrator
@
orch.toml
--trainer.optim.lr
3e-5
--max-steps
5
--orchestrator.env.0.args
{"seed": 4}
--no-clean
--orchestrator.sampling.temperature=0.7"""
TASKS = [
    {
        "id": f"task-{n}",
        "prompt": "Play.",
        "mcp_config": {
            "game": {"url": "http://localhost:8765/mcp", "headers": {"Authorization": "Bearer ${KEY:-none}"}},
            "other": {"command": "python", "args": ["-m", "game"], "env": {"A": "1"}},
        },
        "setup_tool": {"name": "setup", "arguments": {"level": n}},
        "evaluate_tool": [{"name": "evaluate", "arguments": {"board": [[0, 1]]}}],
        "metadata": {"split": "train", "level": n},
    }
    for n in range(3)
]
CHATS = (
    b"\n".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "ab"},
                    {"role": "assistant", "content": "ba", "tool_calls": None},
                ]
            }
        ).encode()
        for _ in range(3)
    )
    + b"\n"
)
REQUEST = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "b"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "max_tokens": 2,
    "temperature": 0.5,
    "n": 2,
    "stop": ["x"],
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 2,
}
ANTHROPIC = {
    "model": "policy",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "b"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
}
RESPONSES = {
    "model": "policy",
    "instructions": "Be brief.",
    "max_output_tokens": 2,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "b"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
}
COMPLETION = {
    "model": "policy",
    "prompt": [[1, 2], [3]],
    "max_tokens": 2,
    "logprobs": 1,
    "stop_token_ids": [2],
    "min_tokens": 1,
    "top_k": 3,
}
GENERATE = {
    "token_ids": [1, 2],
    "sampling_params": {"max_tokens": 2, "temperature": 0.5, "logprobs": 1},
    "stream": False,
}
MANIFEST = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "config": {
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": f"sha256:{'1' * 64}",
        "size": 9,
    },
    "layers": [
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
            "digest": f"sha256:{'2' * 64}",
            "size": 9,
        }
    ],
}
OUTCOME = {
    "reward": 0.5,
    "components": {"a": 1.0},
    "explanations": {"a": "1 of 1"},
    "stop_reason": "done",
    "error": None,
    "turn_rewards": [0.1, 0.2],
    "handle": None,
}
RPC = {
    "jsonrpc": "2.0",
    "id": 3,
    "method": "tools/call",
    "params": {"name": "move", "arguments": {"a": 1}, "_meta": {"progressToken": 5}},
}
ROW = {
    "task_id": "t",
    "rollout": 0,
    "reward": 1.0,
    "error": None,
    "stop_reason": "done",
    "truncated": False,
    "components": {"ortho_miss": 1.0},
    "data": {"family": "a", "split": "b", "lemma": "c"},
}
ENTRY = {
    "name": "buckeye-ab12cd34-0001",
    "provider": "prime",
    "run_dir": "out",
    "run_id": "ab12cd34",
    "gpus": "2xA100",
    "price_per_hour": 2.5,
    "ordered": 1.8e9,
    "pod_id": "p1",
    "ssh": ["root@1.2.3.4:22"],
    "expires": 1.9e9,
}


@dataclass(frozen=True, kw_only=True)
class Loader:
    """`load(folder)` reads a folder with `files`; the file `spoilt`, of the kind that `mutations.spoilt`
    knows, is what is changed. `refusals` are errors that it may raise beside BuckeyeError. `prepare(folder)`
    makes what else has to be there."""

    files: Mapping[str, bytes]
    spoilt: str
    kind: str
    load: Callable[[Path], object]
    refusals: tuple[type[BaseException], ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None


class RefusedError(BuckeyeError):
    """A command has ended with one message."""


def _encoded(value) -> bytes:
    return json.dumps(value, indent=1).encode()


def _command(*words):
    """A command, that ends well or with one message and without "unexpected"."""

    def run(folder):
        from tests.command import run_here

        done = run_here(
            *words,
            cwd=folder,
            env={
                "HOME": str(folder),
                "PATH": "/usr/bin:/bin",
                "HF_HUB_OFFLINE": "1",
                "BUCKEYE_HOME": str(folder / "home"),
                "COLUMNS": "80",
            },
        )
        said = done.stdout + done.stderr
        assert "error: unexpected " not in done.stderr, done.stderr[-2000:]
        assert "Traceback" not in said, said[-4000:]
        if done.returncode:
            assert done.stderr.startswith(("error: ", "usage: ")) or "\nerror: " in done.stderr, said[-2000:]
            raise RefusedError(done.stderr)

    return run


def _config(model, name, *words):
    def load(folder):
        import importlib

        from buckeye.config.load import load_config

        module, _, kind = model.partition(":")
        return load_config(getattr(importlib.import_module(module), kind), [*words, "@", str(folder / name)])

    return load


def _toml(model, content):
    return Loader(files={"c.toml": content}, spoilt="c.toml", kind="toml", load=_config(model, "c.toml"))


def _flags(folder):

    from buckeye.config.load import load_config
    from buckeye.config.rl import RLConfig

    words = (folder / "flags").read_bytes().decode("utf-8", "surrogateescape").split("\n")
    with chdir(folder):
        return load_config(RLConfig, words)


def _gym(folder):
    from buckeye.mcp.config import load_gym_config

    return load_gym_config(folder / "gym.yaml").actions


def _tasks(name):
    def load(folder):
        from buckeye.mcp.tasks.lock import read_lock
        from buckeye.mcp.tasks.rows import as_row, read_with_lock, split_tasks
        from buckeye.mcp.tasks.variables import names_in_servers

        lock = read_lock(folder / "lock.yaml") if (folder / "lock.yaml").exists() else None
        tasks, _ = read_with_lock(folder / name, lock)
        split_tasks(tasks, 0.3 if not any(task.metadata.get("split") for task in tasks) else None)
        return [as_row(task) for task in tasks], names_in_servers(tasks)

    return load


def _rows(folder):
    from buckeye.mcp.tasks.files import read_rows

    rows = json.loads((folder / "rows.json").read_bytes())
    return read_rows((row for row in rows if isinstance(row, dict)), "the dataset")


def _parquet(folder):
    from buckeye.mcp.tasks.dataset import read_splits

    return read_splits(folder / "data")


@cache
def _parquet_file() -> bytes:

    from buckeye.mcp.tasks.dataset import write_dataset
    from buckeye.mcp.tasks.files import read_rows

    with tempfile.TemporaryDirectory() as scratch:
        write_dataset(Path(scratch, "d"), "my/d", {"train": read_rows(TASKS, "here")}, replace=False)
        return next(Path(scratch, "d").rglob("*.parquet")).read_bytes()


def _lock(folder):
    from buckeye.mcp.tasks.lock import read_lock

    return read_lock(folder / "lock.yaml").image_name


def _requirements(folder):
    from buckeye.workers.installed.pins import read_lock

    return read_lock(folder / "requirements.lock").without("numpy")


def _dotenv(folder):
    from buckeye.base.dotenv import read_dotenv

    return read_dotenv(folder / ".env")


def _variables(folder):
    from buckeye.mcp.tasks.variables import names_of, resolve

    value = json.loads((folder / "value.json").read_bytes())
    return resolve(value, {"A": "1"}), names_of(value)


@cache
def _model() -> dict[str, bytes]:

    from buckeye.trainer.model.tiny import TinySize, make_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        size = TinySize(vocab_size=300, layers=1, hidden=64, max_length=128)
        make_tiny_model(Path(scratch, "tiny"), texts=["a b c"] * 4, size=size, seed=0)
        files = {path.name: path.read_bytes() for path in Path(scratch, "tiny").iterdir()}
    return {
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b'{"eos_token_id": [1]}',
        **files,
    }


def _engine(folder):
    """What the embedded engine and the renderer make of a model folder, and what is looked at before."""
    import torch

    from buckeye.inference.engine.architecture import read_spec
    from buckeye.inference.engine.weights import Checkpoint, Weights, auto_dtype
    from buckeye.launch.preflight.model import has_template, missing_files, read_shape

    has_template(folder), missing_files(folder), read_shape(folder)
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    weights = Weights(spec, dtype=auto_dtype(checkpoint, torch.device("cpu")), device=torch.device("cpu"))
    weights.check(checkpoint)
    weights.load(checkpoint)


def _trained_model(folder):
    import torch

    from buckeye.trainer.model.policy import load_policy

    return load_policy(str(folder), torch.device("cpu"))


def _renderer(folder):
    from buckeye.inference.render import ChatRenderer

    renderer = ChatRenderer(folder)
    tools = REQUEST["tools"]
    for messages in (
        [{"role": "user", "content": "a b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ):
        conversation = renderer.render(messages, tools)
        renderer.parse(conversation, conversation.ids[:3])


def _of_model(name, kind, load):
    return Loader(files={}, spoilt=name, kind=kind, load=load, prepare=_put_model)


def _put_model(folder):
    for name, content in _model().items():
        (folder / name).write_bytes(content)


INDEX = {"metadata": {"total_size": 5}, "weight_map": {}}


def _put_indexed(folder):
    from buckeye.inference.engine.architecture import tensor_shapes

    _put_model(folder)
    index = {**INDEX, "weight_map": dict.fromkeys(tensor_shapes(folder), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_bytes(_encoded(index))


ADAPTER = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4.0,
    "target_modules": ["q_proj"],
    "alpha_pattern": {"x": 3},
    "rank_pattern": {},
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "base_model_name_or_path": "model",
    "task_type": "CAUSAL_LM",
}


def _put_adapter(folder):
    import torch
    from safetensors.torch import save

    _put_model(folder)
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter" / "adapter_config.json").write_bytes(_encoded(ADAPTER))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 64), f"{name}.lora_B.weight": torch.zeros(64, 2)}
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(save(tensors))


def _adapter(folder):
    from buckeye.inference.engine.adapters import AdaptedCheckpoint
    from buckeye.trainer.model.adapter_files import check_base

    AdaptedCheckpoint(folder, folder / "adapter")
    check_base(folder / "adapter", str(folder))


def _of_adapter(name, kind):
    return Loader(files={}, spoilt=f"adapter/{name}", kind=kind, load=_adapter, prepare=_put_adapter)


def _put_checkpoint(folder):
    from buckeye.base.process import RunIdentity
    from buckeye.transport.checkpoint import save_checkpoint

    def fill(directory):
        (directory / "model.safetensors").write_bytes(b"m")
        return {}

    root = folder / "checkpoints"
    if not root.exists():
        identity = RunIdentity(run_id="r", attempt=1)
        save_checkpoint(root, 4, fill, orchestrator_state={"step": 4}, identity=identity)


def _checkpoint(folder):
    from buckeye.transport.checkpoint import (
        checkpoints_by_age,
        list_checkpoints,
        read_orchestrator_state,
        resolve_checkpoint,
        usable_checkpoint,
        verify_checkpoint,
    )

    root = folder / "checkpoints"
    list_checkpoints(root), checkpoints_by_age(root), usable_checkpoint(root, -1, verify_checkpoint)
    info = resolve_checkpoint(root, -1)
    verify_checkpoint(info)
    return read_orchestrator_state(info)


def _of_checkpoint(name, kind="json"):
    return Loader(
        files={}, spoilt=f"checkpoints/step_4/{name}", kind=kind, load=_checkpoint, prepare=_put_checkpoint
    )


def _put_weights(folder):
    from buckeye.base.process import RunIdentity
    from buckeye.transport.weights import publish_weights

    if not (folder / "weights").exists():
        fill = lambda directory: (directory / "model.safetensors").write_bytes(b"m") and None  # noqa: E731
        publish_weights(
            folder / "weights", 3, fill, identity=RunIdentity(run_id="r", attempt=1), dtype="float32"
        )


def _weights(folder):
    from buckeye.base.process import RunIdentity
    from buckeye.transport.weights import newest_weights, verify_weights

    newest_weights(folder / "weights", identity=RunIdentity(run_id="r", attempt=1))
    return verify_weights(folder / "weights" / "step_3")


def _put_batch(folder):
    import numpy as np

    from buckeye.base.process import RunIdentity
    from buckeye.transport.batches import Batch, Sample, write_batch

    if not (folder / "batches").exists():
        ids = np.arange(3, dtype=np.int32)
        sample = Sample(
            token_ids=ids,
            loss_mask=ids > 0,
            logprobs=ids.astype(np.float32),
            versions=ids,
            advantages=ids.astype(np.float32),
            temperature=1.0,
        )
        identity = RunIdentity(run_id="r", attempt=1)
        write_batch(
            folder / "batches", Batch(step=2, samples=(sample,) * 2, orchestrator_state={}), identity=identity
        )


def _batch(folder):
    import hashlib

    from buckeye.base.process import RunIdentity
    from buckeye.transport.batches import DATA, MANIFEST, foreign_batches, read_batch

    step, identity = folder / "batches" / "step_2", RunIdentity(run_id="r", attempt=1)
    foreign_batches(folder / "batches", identity=identity)
    read_batch(folder / "batches", 2, identity=identity)
    # the same with a checksum that is right
    manifest = json.loads((step / MANIFEST).read_text())
    return manifest, hashlib.sha256((step / DATA).read_bytes())


def _of_batch(name, kind="json"):
    return Loader(
        files={}, spoilt=f"batches/{name}", kind=kind, load=_batch, prepare=_put_batch, refusals=(ValueError,)
    )


def _put_run(folder):
    from tests.run.made_runs import made_run, write_metrics

    if (folder / "run").exists():
        return
    run = made_run(folder / "run", checkpoints=(2,), max_steps=4)
    for step in range(4):
        write_metrics(
            run,
            ("orchestrator", step, step, {"reward/mean": 0.5, "attempt": 1}),
            ("trainer", step, step, {"loss": 0.1, "attempt": 1}),
        )
    (run / "events.jsonl").write_text(
        '{"time": 1700000000.0, "event": "started", "attempt": 1}\n'
        '{"time": 1700000001.0, "event": "restart", "attempt": 1, "process": "trainer"}\n'
    )
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "run.log").write_text("2023-11-14 22:13:20,001 [trainer]   ERROR out of luck\n")
    (run / "evals" / "step_2").mkdir(parents=True)
    (run / "evals" / "step_2" / "words.json").write_text(
        json.dumps(
            {"env": "words", "id": "words", "step": 2, "mean_reward": 0.5, "model": "m", "n": 2, "attempt": 1}
        )
    )
    (run / "evals" / "step_2" / "words.jsonl").write_text(
        f"{json.dumps(ROW)}\n{json.dumps(ROW | {'rollout': 1})}\n"
    )
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_1.jsonl").write_text(
        json.dumps(
            {
                "group": 0,
                "env": "words",
                "task_id": "t",
                "reward": 1.0,
                "text": ["a"],
                "stop_reason": "done",
                "error": None,
                "completion_tokens": 3,
            }
        )
        + "\n"
    )


def _put_remote_run(folder):
    from buckeye.run_files.known_runs import Elsewhere, JobThere, write_elsewhere

    _put_run(folder)
    there = dict.fromkeys(JobThere.__struct_fields__, "x") | {"target": "root@1.2.3.4:22", "sent": ["a"]}
    job = msgspec.convert(there, JobThere)
    away = Elsewhere(run_id="aaaa1111", state="running", started=1.7e9, said=1.7e9, doing="trains", job=job)
    write_elsewhere(folder / "run", away)


def _run(folder):
    from buckeye.runs.checkpoint_facts import read_config
    from buckeye.runs.status import find_checkpoint, run_status
    from buckeye.runs.stop import continuation

    run = folder / "run"
    read_config(run)
    find_checkpoint(run, "best")
    continuation(run, [])
    return run_status(run)


def _of_run(name, kind, load):
    return Loader(files={}, spoilt=f"run/{name}", kind=kind, load=load, prepare=_put_run)


def _evaluations(folder):
    from buckeye.transport.checkpoint import read_scores

    return read_scores(folder / "run")


def _remote_place(folder):
    from buckeye.remote.steer import terminal_of

    return terminal_of(folder / "run")


def _eval_rows(folder):
    from buckeye.evaluation.figures import figures_of
    from buckeye.evaluation.rows import read_rows

    rows = list(read_rows(folder / "rollouts.jsonl").values())
    return figures_of(rows, each=1, pass_reward=1.0) if rows else None


def _ledger(folder):
    from buckeye.remote.ledger import Ledger

    entry = Ledger(folder).read("p")
    return Ledger(folder).entries(), entry.cost(2e9)


def _offers(folder):
    from tests.remote.landlord import FakeTime

    from buckeye.remote.base import GpuRequest
    from buckeye.remote.offers import offer_table
    from buckeye.remote.providers.prime import PrimeProvider
    from buckeye.remote.providers.prime_account import PrimeAccount

    body = (folder / "answer.json").read_bytes()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    account = PrimeAccount(api_key="k", url="http://p", team_id=None, ssh_key_path=None)
    provider = PrimeProvider(account, clock=FakeTime(), transport=transport)
    found = provider.offers(GpuRequest(count=2, type="A100_80GB"), disk_gb=100)
    return offer_table(found)


def _offers_answer() -> bytes:
    from tests.remote.landlord import usual_rows

    return _encoded({"items": usual_rows(), "totalCount": 4})


def _pods(folder):
    from tests.remote.landlord import FakeTime

    from buckeye.remote.providers.prime import PrimeProvider
    from buckeye.remote.providers.prime_account import PrimeAccount

    body = (folder / "answer.json").read_bytes()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    account = PrimeAccount(api_key="k", url="http://p", team_id=None, ssh_key_path=None)
    provider = PrimeProvider(account, clock=FakeTime(), transport=transport)
    return provider.status("p1")


PODS = {
    "data": [
        {
            "podId": "p1",
            "id": "p1",
            "name": "buckeye-x-0001",
            "status": "ACTIVE",
            "sshConnection": ["root@1.2.3.4 -p 22"],
            "ip": "1.2.3.4",
            "priceHr": 2.5,
            "installationProgress": 100,
            "installationFailure": None,
        }
    ]
}


def _hosts(folder):
    from buckeye.remote.connection import parse_target
    from buckeye.remote.known_hosts import known_keys

    return known_keys(folder / "known_hosts", parse_target("root@1.2.3.4:2222"))


def _manifest(folder):
    from buckeye.errors import UsageError
    from buckeye.mcp.images.manifest import parse_manifest

    try:
        content = json.loads((folder / "manifest.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(str(error)) from None  # as the registry's client does
    if not isinstance(content, dict):
        raise UsageError("no object")
    return parse_manifest(content, digest="sha256:" + "3" * 64, kind=MANIFEST["mediaType"], shown="my-env")


def _layer_file() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, link in (
            ("etc", tarfile.DIRTYPE, ""),
            ("etc/motd", tarfile.REGTYPE, ""),
            ("etc/link", tarfile.SYMTYPE, "motd"),
            ("etc/hard", tarfile.LNKTYPE, "etc/motd"),
            ("etc/.wh.old", tarfile.REGTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, 5 if name == "etc/motd" else 0
            tar.addfile(info, io.BytesIO(b"hello") if info.size else None)
    return data.getvalue()


def _layers(folder):
    import hashlib

    from buckeye.mcp.images.unpack import unpack_layers

    data = gzip.compress((folder / "layer.tar").read_bytes(), mtime=0)
    with tempfile.TemporaryDirectory() as scratch:
        layer, root = Path(scratch, "layer"), Path(scratch, "root")
        layer.write_bytes(data)
        root.mkdir()
        try:
            return unpack_layers(
                [layer],
                [f"sha256:{hashlib.sha256((folder / 'layer.tar').read_bytes()).hexdigest()}"],
                root,
                owner=None,
            )
        finally:
            assert not (Path(scratch).parent / "etc").exists()
            shutil.rmtree(root, ignore_errors=True)


def _reference(folder):
    from buckeye.mcp.images.manifest import parse_reference
    from buckeye.mcp.tasks.lock import parse_image

    text = (folder / "name").read_bytes().decode("utf-8", "replace")
    parse_image(text)
    return parse_reference(text)


def _login(folder):
    import os
    from unittest import mock

    from buckeye.mcp.images.logins import find_login

    with mock.patch.dict(os.environ, {"DOCKER_CONFIG": str(folder), "HOME": str(folder)}):
        return find_login("ghcr.io")


def _prime_file(folder):
    import os
    from unittest import mock

    from buckeye.remote.providers.prime_account import prime_account

    with mock.patch.dict(os.environ, {"HOME": str(folder)}):
        return prime_account({})


def _openai(kind):
    def load(folder):
        import buckeye.chat.openai_api as dialect

        return dialect.parse((folder / "body").read_bytes(), getattr(dialect, kind))

    return load


def _wire(route):
    def load(folder):
        from tests.workers.proxy.test_wire_malformed import post

        status, body, _ = post(route, (folder / "body").read_bytes())
        assert status < 500, body
        if status >= 400:
            assert json.loads(body)["error"], body
            raise RefusedError(body.decode())

    return load


def _worker_frame(folder):
    from buckeye.envs.stdlib_only.outcomes import checked_outcome
    from buckeye.workers.worker_side.frames import decode

    frame = decode((folder / "frame").read_bytes())
    return checked_outcome(frame.get("outcome"))


def _worker_refusals():
    from buckeye.envs.stdlib_only.outcomes import OutcomeError
    from buckeye.workers.worker_side.frames import FrameError

    return FrameError, OutcomeError


def _gateway_refusals():
    from buckeye.mcp.gateway.frames import Refusal

    return (Refusal,)


def _rpc(folder):
    from buckeye.mcp.gateway.frames import one_line, read_frame, read_line

    body = (folder / "frame").read_bytes()
    read_line(body)
    read_frame(body)
    return one_line(body)


def _chats(folder):
    from buckeye.trainer.data.chat_data import ChatFile

    return ChatFile(folder / "chats.jsonl", _chat_format(), seed=0, seq_len=64).all()


@cache
def _chat_format():

    from buckeye.trainer.data.chat_data import ChatFormat

    scratch = tempfile.mkdtemp()
    for name, content in _model().items():
        Path(scratch, name).write_bytes(content)
    return ChatFormat(scratch)


LOSS = (
    b"def loss(inputs, low=0.2, high=0.3):\n    return -(inputs.logprobs * inputs.advantages)  # {a comment\n"
)


@contextmanager
def _copy_of(folder):
    """Another folder with the same files: for what is read once, or remembered by its name."""
    with tempfile.TemporaryDirectory() as scratch:
        yield shutil.copytree(folder, Path(scratch, "copy"))


def _loss(folder):
    from buckeye.config.losses import CustomLossConfig
    from buckeye.trainer.losses.policy_gradient import load_custom_loss

    with _copy_of(folder) as copy:
        config = CustomLossConfig(import_path=f"{copy / 'loss.py'}:loss", kwargs={"low": 0.1})
        return load_custom_loss(config)


def _replies(folder):
    from buckeye.inference.render.parse_reply import bare_call, tagged_calls
    from buckeye.mcp.actions.parser import parse_reply, parse_tool_calls
    from buckeye.mcp.config import ParserConfig

    text = (folder / "reply").read_bytes().decode("utf-8", "replace")
    tagged_calls(text), bare_call(text)
    parse_tool_calls(
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": "a", "function": {"name": "move", "arguments": text}}],
        },
        ParserConfig(format="tools"),
        ["move"],
    )
    return parse_reply(text, ParserConfig(), ["move", "done"])


def _restarts(folder):
    from buckeye.transport.inference_servers import take_restart_requests

    with _copy_of(folder) as copy:
        return take_restart_requests(copy)


RECORD = {
    "name": "b",
    "id": "a/b",
    "version": "1.0",
    "generation": "verifiers-v0",
    "module": "b",
    "source": "here",
    "extras": [],
    "index": None,
    "python": "/x/env/venv/bin/python",
    "python_version": "3.11",
    "constraints": [],
    "requirements": ["b==1.0"],
    "installed_at": "2026-01-31T12:00:00+00:00",
}


def _installed(folder):
    from buckeye.workers.installed.record import read_record

    return read_record(folder / "env")


def _one(name, content, kind, load, refusals=()):
    return Loader(files={name: content}, spoilt=name, kind=kind, load=load, refusals=refusals)


def _recursion_is_a_refusal():
    return (RecursionError,)


CONFIG = "buckeye.config."
LOADERS: dict[str, Loader] = {
    "rl.toml": _toml(f"{CONFIG}rl:RLConfig", RL),
    "trainer.toml": _toml(f"{CONFIG}trainer:TrainerConfig", TRAINER),
    "orchestrator.toml": _toml(f"{CONFIG}orchestrator:OrchestratorConfig", ORCHESTRATOR),
    "inference.toml": _toml(f"{CONFIG}inference:InferenceConfig", INFERENCE),
    "sft.toml": _toml(f"{CONFIG}sft:SFTConfig", SFT),
    "flags": Loader(
        files={"flags": FLAGS, "train.toml": TRAINER, "orch.toml": ORCHESTRATOR},
        spoilt="flags",
        kind="text",
        load=_flags,
    ),
    "gym file": _one("gym.yaml", GYM, "yaml", _gym),
    "lock": _one("lock.yaml", LOCK, "yaml", _lock),
    "requirements.lock": _one(
        "requirements.lock", b"# made\nnumpy==2.0 \\\n    --hash=sha256:00\nx-y==1\n", "text", _requirements
    ),
    "tasks JSON": _one("tasks.json", _encoded(TASKS), "json", _tasks("tasks.json")),
    "tasks JSONL": _one(
        "tasks.jsonl", b"".join(json.dumps(t).encode() + b"\n" for t in TASKS), "lines", _tasks("tasks.jsonl")
    ),
    "tasks with a lock": Loader(
        files={
            "tasks.json": _encoded([{k: v for k, v in t.items() if k != "mcp_config"} for t in TASKS]),
            "lock.yaml": LOCK,
        },
        spoilt="lock.yaml",
        kind="yaml",
        load=_tasks("tasks.json"),
    ),
    "dataset rows": Loader(
        files={
            "rows.json": _encoded(
                [{k: v if isinstance(v, str) else json.dumps(v) for k, v in t.items()} for t in TASKS]
            )
        },
        spoilt="rows.json",
        kind="json",
        load=_rows,
        refusals=(ValueError, RecursionError),
    ),
    "dataset parquet": Loader(
        files={},
        spoilt="data/train.parquet",
        kind="binary",
        load=_parquet,
        prepare=lambda folder: (
            (folder / "data").mkdir(exist_ok=True),
            (folder / "data" / "train.parquet").write_bytes(_parquet_file()),
        ),
    ),
    ".env": _one(".env", b"A=1\nexport B='two words' # why\nC=\"x\\n$A\"\n", "text", _dotenv),
    "variables": _one(
        "value.json",
        _encoded({"a": ["$A", "${B:-2}", "$$x", "${C:-}"]}),
        "json",
        _variables,
        refusals=(ValueError, RecursionError),
    ),
    "config.json, engine": _of_model("config.json", "json", _engine),
    "config.json, trainer": _of_model("config.json", "json", _trained_model),
    "generation_config.json": _of_model(
        "generation_config.json", "json", lambda folder: (_renderer(folder), _engine(folder))
    ),
    "tokenizer.json": _of_model("tokenizer.json", "json", _renderer),
    "tokenizer_config.json": _of_model("tokenizer_config.json", "json", _renderer),
    "chat template": _of_model("chat_template.jinja", "text", _renderer),
    "model.safetensors": _of_model("model.safetensors", "safetensors", _engine),
    "model.safetensors, trainer": _of_model("model.safetensors", "safetensors", _trained_model),
    "safetensors index": Loader(
        files={}, spoilt="model.safetensors.index.json", kind="json", load=_engine, prepare=_put_indexed
    ),
    "adapter_config.json": _of_adapter("adapter_config.json", "json"),
    "adapter_model.safetensors": _of_adapter("adapter_model.safetensors", "safetensors"),
    "COMMITTED": _of_checkpoint("COMMITTED"),
    "orchestrator state": _of_checkpoint("orchestrator/state.json"),
    "weights manifest": Loader(
        files={}, spoilt="weights/step_3/manifest.json", kind="json", load=_weights, prepare=_put_weights
    ),
    "batch manifest": _of_batch("step_2/manifest.json"),
    "batch data": _of_batch("step_2/batch.safetensors", "safetensors"),
    "run.json": _of_run("run.json", "json", _run),
    "status.json": _of_run("status.json", "json", _run),
    "configs/rl.json": _of_run("configs/rl.json", "json", _run),
    "metrics.jsonl": _of_run("metrics.jsonl", "lines", _run),
    "status.json, rl status": _of_run("status.json", "json", _command("rl", "status", "run")),
    "metrics.jsonl, rl status": _of_run("metrics.jsonl", "lines", _command("rl", "status", "run", "--json")),
    "run.json, rl status": _of_run("run.json", "json", _command("rl", "status", "run")),
    "events.jsonl, rl logs --events": _of_run(
        "events.jsonl", "lines", _command("rl", "logs", "run", "--events")
    ),
    "run.log, rl logs": _of_run("logs/run.log", "text", _command("rl", "logs", "run")),
    "evals JSON": _of_run("evals/step_2/words.json", "json", _evaluations),
    "evals JSONL": _of_run("evals/step_2/words.jsonl", "lines", _evaluations),
    "remote.json": Loader(
        files={}, spoilt="run/remote.json", kind="json", load=_remote_place, prepare=_put_remote_run
    ),
    "remote.json, rl status": Loader(
        files={},
        spoilt="run/remote.json",
        kind="json",
        load=_command("rl", "status", "run"),
        prepare=_put_remote_run,
    ),
    "eval rows": _one("rollouts.jsonl", (json.dumps(ROW) + "\n").encode() * 2, "lines", _eval_rows),
    "ledger": _one("p.json", _encoded(ENTRY), "json", _ledger),
    "offers": Loader(
        files={"answer.json": _offers_answer()}, spoilt="answer.json", kind="json", load=_offers
    ),
    "pod status": Loader(
        files={"answer.json": _encoded(PODS)}, spoilt="answer.json", kind="json", load=_pods
    ),
    "known_hosts": _one("known_hosts", b"[1.2.3.4]:2222 ssh-ed25519 AAAA\n", "text", _hosts),
    "prime's file": _one(
        ".prime/config.json",
        _encoded(
            {
                "api_key": "pit_x",
                "team_id": "t",
                "base_url": "https://api.example.org",
                "ssh_key_path": "~/.ssh/id",
            }
        ),
        "json",
        _prime_file,
    ),
    "image manifest": _one("manifest.json", _encoded(MANIFEST), "json", _manifest),
    "image layer": _one("layer.tar", _layer_file(), "binary", _layers),
    "image name": _one("name", f"ghcr.io/my-org/my-env:0.1@sha256:{'0' * 64}".encode(), "text", _reference),
    "registry login": _one(
        "config.json",
        _encoded({"auths": {"ghcr.io": {"auth": "YTpi"}}, "credHelpers": {"x.io": "y"}}),
        "json",
        _login,
    ),
    "chat request": _one("body", _encoded(REQUEST), "json", _openai("ChatRequest")),
    "completion request": _one("body", _encoded(COMPLETION), "json", _openai("CompletionRequest")),
    "generate request": _one("body", _encoded(GENERATE), "json", _openai("GenerateRequest")),
    "wire chat": _one(
        "body", _encoded({**REQUEST, "tool_choice": "auto"}), "json", _wire("v1/chat/completions")
    ),
    "wire completion": _one("body", _encoded({**COMPLETION, "prompt": "a"}), "json", _wire("v1/completions")),
    "wire messages": _one("body", _encoded(ANTHROPIC), "json", _wire("v1/messages")),
    "wire responses": _one("body", _encoded(RESPONSES), "json", _wire("v1/responses")),
    "worker message": _one(
        "frame",
        _encoded({"type": "result", "id": 1, "outcome": OUTCOME}),
        "json",
        _worker_frame,
        refusals=_worker_refusals(),
    ),
    "gateway message": _one("frame", _encoded(RPC), "json", _rpc, refusals=_gateway_refusals()),
    "sft chats": _one("chats.jsonl", CHATS, "lines", _chats),
    "custom loss": _one("loss.py", LOSS, "text", _loss),
    "replies": _one(
        "reply",
        b'<think>I must {think}</think><tool>move("left", far=[1, {"a": 2}])</tool>',
        "text",
        _replies,
    ),
    "restart requests": _one(
        "restart/1.json", _encoded({"url": "http://127.0.0.1:1", "reason": "x"}), "json", _restarts
    ),
    "installed environment": _one("env/environment.json", _encoded(RECORD), "json", _installed),
}
