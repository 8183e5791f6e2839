"""Measure the peak memory of a run's processes, next to the plan of `rl doctor`.

    python benchmarks/memory.py [--kinds engine full lora] [--models 30M 135M 0.5B] [--lengths 256 512 1024]
    python benchmarks/memory.py --table

Every case is a real process that works on a model, one at a time: a trainer for three steps, with a
checkpoint after each; an engine that answers three rounds of 32 prompts and gets new weights before the
second and the third. The result is the peak of resident memory as the kernel counts it (`ru_maxrss`), which
includes mapped files. Large pages are used, as `rl` does. Results are appended to a file with one JSON object
per line, and are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from inference_models import make_model

from buckeye.base.process import RunIdentity
from buckeye.base.storage import read_json
from buckeye.config.load import load_with_warnings
from buckeye.config.rl import RLConfig
from buckeye.inference.client import InferenceClient
from buckeye.launch.plan import KEEP_FREED_MEMORY
from buckeye.launch.preflight.devices import MainMemory, main_memory
from buckeye.launch.preflight.memory_plan import Hardware, plan_memory, processor_has
from buckeye.launch.preflight.model_shape import parse_shape
from buckeye.transport.batches import Batch, Sample, write_batch
from buckeye.transport.weights import publish_weights, read_weights_manifest

KINDS = ("engine", "full", "lora")
STEPS = 3
ROLLOUTS = 32
REPLY = 40
_LORA = ("--trainer.model.experimental.lora", "{}")
_ME = RunIdentity(run_id="local", attempt=1)
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "max_position_embeddings",
)


def case(kind: str, model: Path, length: int, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return all inputs of the plan for a process; `words` are flags of `rl` for its trainer."""
    config = read_json(model / "config.json")
    return {
        "kind": kind,
        "shape": {key: config[key] for key in _SHAPE if config.get(key) is not None},
        "length": length,
        "words": list(words),
        "fast_bfloat16": processor_has("avx512_bf16", "amx_tile"),
        "memory": main_memory().total,
    }


def planned(case: dict[str, Any]) -> int:
    """Return the bytes that the plan allows the process."""
    length = str(case["length"])
    words = ["--model.name", "m", "--inference", "{}", "--inference.model.max-model-len", length]
    words += ["--max-async-level", "0", "--trainer.seq-len", length, "--orchestrator.seq-len", "128"]
    words += ["--orchestrator.batch-size", str(ROLLOUTS), "--trainer.seed", "1", *case["words"]]
    config, _ = load_with_warnings(RLConfig, [*words, *(_LORA if case["kind"] == "lora" else ())])
    memory = MainMemory(total=case["memory"], free=case["memory"])
    hardware = Hardware(memory=memory, fast_bfloat16=case["fast_bfloat16"])
    process = "inference 0" if case["kind"] == "engine" else "trainer 0"
    needs = plan_memory(config, parse_shape(case["shape"]), hardware)
    return next(need.total for need in needs if need.process == process)


def measured(kind: str, model: Path, length: int, words: tuple[str, ...] = ()) -> int:
    """Return the peak bytes of such a process. Raise RuntimeError, with its output, if it fails."""
    with tempfile.TemporaryDirectory(prefix="buckeye-memory-") as folder:
        if kind == "engine":
            return asyncio.run(_measured_engine(model, length, Path(folder)))
        lora = _LORA if kind == "lora" else ()
        return _measured_trainer(model, length, (*words, *lora), Path(folder))


def _measured_trainer(model: Path, length: int, words: tuple[str, ...], folder: Path) -> int:
    vocabulary = read_json(model / "config.json")["vocab_size"]
    for step in range(STEPS):
        batch = Batch(step=step, samples=_samples(length, vocabulary), orchestrator_state={})
        write_batch(folder / "batches", batch, identity=_ME)
    flags = [word.replace("--trainer.", "--") for word in words]
    argv = [
        "worker",
        "trainer",
        "--max-steps",
        str(STEPS),
        "--model.name",
        str(model),
        "--model.device",
        "cpu",
        "--seq-len",
        str(length),
    ]
    argv += ["--seq-len", str(length), "--ckpt.interval", "1", "--max-async-level", "4"]
    argv += ["--output-dir", str(folder), *flags]
    with _Process(argv, folder, GLIBC_TUNABLES=KEEP_FREED_MEMORY) as process:
        return process.peak()


def _samples(length: int, vocabulary: int) -> tuple[Sample, ...]:
    """Return two full rows of samples of 128 tokens."""
    draw = np.random.default_rng(0)
    mask = np.arange(128) >= 32
    return tuple(
        Sample(
            token_ids=draw.integers(0, vocabulary, 128).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -9.0, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.full(128, draw.normal(), np.float32),
            temperature=1.0,
        )
        for _ in range(max(2, 2 * length // 128))
    )


async def _measured_engine(model: Path, length: int, folder: Path) -> int:
    argv = ["serve", "--model.name", str(model), "--model.device", "cpu"]
    argv += ["--model.max-model-len", str(length), "--output-dir", str(folder)]
    argv += ["--server.port", str(_free_port())]
    with _Process(argv, folder) as process:
        url = process.url()
        async with InferenceClient([url], api_key=None, timeout=600, model=str(model)) as client:
            await client.wait_ready(120)
            for version in range(STEPS):
                if version:
                    await _update(client, model, folder / "weights", version)
                await _answer(url, model, length, version)
        process.process.terminate()
        return process.peak()


async def _update(client: InferenceClient, model: Path, root: Path, version: int) -> None:
    def fill(directory: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(model / name, directory / name)

    path = publish_weights(root, version, fill, identity=_ME, dtype="float32")
    await client.update_weights(path, version, read_weights_manifest(path).checksum)


async def _answer(url: str, model: Path, length: int, seed: int) -> None:
    vocabulary = read_json(model / "config.json")["vocab_size"]
    draw = np.random.default_rng(seed)
    prompts = draw.integers(0, vocabulary, (ROLLOUTS, length - REPLY - 1)).tolist()
    body = {"model": str(model), "prompt": prompts, "max_tokens": REPLY, "seed": seed}
    async with httpx.AsyncClient(timeout=1800) as http:
        (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


class _Process:
    """Buckeye command as a process, ended with the block."""

    def __init__(self, argv: list[str], folder: Path, **variables: str) -> None:
        self._out = folder / "stdout"
        with self._out.open("wb") as out:
            command = [sys.executable, "-m", "buckeye", *argv]
            environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()

    def url(self) -> str:
        """Return the address of a server, once it listens."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            _, found, rest = self._out.read_text().partition("ready on ")
            if found:
                return rest.split()[0]
            time.sleep(0.1)
        raise RuntimeError(f"no server: {self._out.read_text()[-3000:]}")

    def peak(self) -> int:
        """Return the peak bytes of the process, after it has ended by itself."""
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode not in (0, 143, -15):
            raise RuntimeError(self._out.read_text()[-3000:])
        return used.ru_maxrss * 1024


def main() -> int:
    """Measure the missing cases; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--models", nargs="+", default=["30M", "135M", "0.5B"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--table", action="store_true", help="only print what has been measured")
    parser.add_argument("--out", type=Path, default=Path("outputs/memory.jsonl"), help="where it is kept")
    args = parser.parse_args()
    known = _known(args.out)
    for name in [] if args.table else args.models:
        with tempfile.TemporaryDirectory(prefix="buckeye-memory-") as folder:
            model = make_model(Path(folder), name)
            for kind in args.kinds:
                for length in args.lengths:
                    asked = {"model": name, **case(kind, model, length)}
                    if not any(asked.items() <= one.items() for one in known):
                        known.append(asked | {"measured": measured(kind, model, length)})
                        args.out.parent.mkdir(parents=True, exist_ok=True)
                        args.out.write_text("".join(f"{json.dumps(one)}\n" for one in known))
                        _print_row(known[-1])
    print("\n| process | model | tokens | planned, GB | measured, GB | planned / measured |")
    print("|---|---|---:|---:|---:|---:|")
    for one in known:
        _print_row(one)
    return 0


def _known(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _print_row(one: dict[str, Any]) -> None:
    plan, held = planned(one), one["measured"]
    process = {"engine": "engine", "full": "trainer", "lora": "trainer, LoRA"}[one["kind"]]
    cells = (
        process,
        one["model"],
        one["length"],
        f"{plan / 1e9:.2f}",
        f"{held / 1e9:.2f}",
        f"{plan / held:.2f}",
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
