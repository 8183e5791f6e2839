"""Compare the embedded engine over HTTP with transformers and vLLM on the CPU, and with a lower limit.

The limit is a bare decode loop on preallocated tensors, in one process, without requests. From transformers,
`generate` and continuous batching are measured.

    python benchmarks/inference.py [--quick] [--rounds 3] [--threads 2] [--model DIRECTORY ...]

All have the same weights, dtype and number of threads, are loaded at the same time, and are measured in turn,
in a different order in each round. The others are stopped meanwhile (SIGSTOP), because idle engines poll and
spin. Ratios are medians over rounds. Every request has 32 prompt tokens and 96 new ones, and requests their
log-probs. vLLM is left out, with a message, if it is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from inference_load import KEY, Endpoint, random_prompts, throughput
from inference_models import MODELS, make_model
from inference_update import UPDATE_COLUMNS, measure_updates

from buckeye.errors import UsageError
from buckeye.inference.vllm.interpreter import find_vllm

START_SECONDS = 300.0
STOP_SECONDS = 20.0
RIVALS = Path(__file__).with_name("inference_rivals.py")
CONCURRENCIES = (1, 16, 128)
NAMES = {
    "embedded": "embedded (HTTP)",
    "generate": "`generate`",
    "continuous": "continuous batching",
    "vllm": "vLLM (HTTP)",
    "bare": "bare loop",
}


class Contender(ABC):
    """Process that samples; `start_seconds` is from its start to its first answer."""

    def __init__(self, command: list[str], folder: Path, name: str, threads: int, **pipes: int) -> None:
        environment = os.environ | {
            "BUCKEYE_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "BUCKEYE_PARENT_PID": str(os.getpid()),  # servers exit with this process, however it ends
        }
        self.log = folder / f"{name}.log"
        self._started = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, **({"stdout": log} | pipes), stderr=log, text=True, env=environment
            )
        self.start_seconds = 0.0

    def answered(self) -> None:
        """Record that the first answer has arrived."""
        self.start_seconds = time.perf_counter() - self._started

    @abstractmethod
    def measure(self, prompts: list[list[int]], concurrency: int) -> float:
        """Return tokens per second."""

    def memory(self) -> float:
        """Return GB of memory of the process and its children; shared pages count in proportion (PSS)."""
        return sum(one.memory_full_info().pss for one in self._processes()) / 1e9

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the process run; it is stopped outside this context."""
        for one in self._processes():
            one.resume()
        try:
            yield
        finally:
            self.suspend()

    def suspend(self) -> None:
        """Stop the process until the next `awake`."""
        for one in self._processes():
            one.suspend()

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def stop(self) -> None:
        """End the process."""
        for one in self._processes() if self.process.poll() is None else ():
            one.resume()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def failed(self, what: str) -> RuntimeError:
        """Return an error with the failure and the end of the log."""
        return RuntimeError(f"{self.process.args!r} {what}:\n{self.log.read_text()[-2000:]}")


class Server(Contender):
    """`buckeye inference` with one of its backends."""

    def __init__(self, model: Path, backend: str, folder: Path, *, dtype: str, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {
            "model": {"name": str(model), "dtype": dtype, "device": "cpu", "max_model_len": 1024},
            "server": {"port": port},
            "backend": backend,
            "max_num_seqs": max(CONCURRENCIES),
            "log": {"level": "warning"},
            "output_dir": str(folder / backend),
            "weights_dir": str(folder),
        }
        config = folder / f"{backend}.json"
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "buckeye", "serve", "@", str(config)]
        super().__init__(command, folder, backend, threads)
        self.endpoint = Endpoint(port=port, model=str(model))
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed("ended before it answered")
            try:
                asyncio.run(throughput(self.endpoint, [[1] * 8], 1, new_tokens=1))
            except (OSError, asyncio.IncompleteReadError):
                time.sleep(0.02)
                continue
            self.answered()
            return
        raise self.failed(f"did not answer within {START_SECONDS:g} s")

    def measure(self, prompts: list[list[int]], concurrency: int) -> float:
        """Return tokens per second, over HTTP."""
        return asyncio.run(throughput(self.endpoint, prompts, concurrency))


class Rival(Contender):
    """One contender of benchmarks/inference_rivals.py."""

    def __init__(self, kind: str, model: Path, folder: Path, *, dtype: str, threads: int) -> None:
        command = [sys.executable, str(RIVALS), kind, str(model), dtype, str(threads)]
        super().__init__(command, folder, kind, threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()
        self.answered()

    def measure(self, prompts: list[list[int]], concurrency: int) -> float:
        """Return tokens per second, timed by the process itself."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "concurrency": concurrency}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["tokens"] / answer["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failed("ended without an answer")
        return json.loads(line)


def start(model: Path, folder: Path, wanted: list[str], dtype: str, threads: int) -> dict[str, Contender]:
    """Start the contenders in sequence. The embedded engine is first and determines the dtype."""
    contenders: dict[str, Contender] = {}
    try:
        for kind in wanted:
            if kind in ("embedded", "vllm"):
                backend = "torch" if kind == "embedded" else "vllm"
                server = Server(model, backend, folder, dtype=dtype, threads=threads)
                contenders[kind] = server
                if kind == "embedded":
                    dtype = served_dtype(server.endpoint)
            else:
                contenders[kind] = Rival(kind, model, folder, dtype=dtype, threads=threads)
            contenders[kind].suspend()
    except BaseException:
        stop(contenders)
        raise
    print(f"\n## {model.name} ({dtype}, {threads} threads)\n", flush=True)
    return contenders


def stop(contenders: dict[str, Contender]) -> None:
    """End all contenders."""
    for contender in contenders.values():
        contender.stop()


def served_dtype(endpoint: Endpoint) -> str:
    """Return the dtype that a server computes in."""
    import httpx

    url, key = f"http://127.0.0.1:{endpoint.port}/weight_info", {"Authorization": f"Bearer {KEY}"}
    answer = httpx.get(url, headers=key, trust_env=False, timeout=30)
    return answer.json()["dtype"]


def compare(contenders: dict[str, Contender], vocab: int, rounds: int, concurrencies: list[int]) -> None:
    """Print tokens per second and the embedded engine's ratio to each of the others."""
    others = [kind for kind in contenders if kind != "embedded"]
    print(f"| concurrency | {' | '.join(NAMES[kind] for kind in contenders)} |")
    print(f"|---:|{'---:|' * len(contenders)}")
    for concurrency in concurrencies:
        speeds: list[dict[str, float]] = []
        for number in range(rounds):
            order = (
                list(contenders)[number % len(contenders) :] + list(contenders)[: number % len(contenders)]
            )
            prompts = random_prompts(max(4, 2 * concurrency), vocab, seed=number)
            speeds.append({})
            for kind in order:
                with contenders[kind].awake():
                    speeds[-1][kind] = contenders[kind].measure(prompts, concurrency)
        cells = [f"{statistics.median(s['embedded'] for s in speeds):.0f}"]
        for kind in others:
            speed = statistics.median(s[kind] for s in speeds)
            ratio = statistics.median(s["embedded"] / s[kind] for s in speeds)
            cells.append(f"{speed:.0f} ({ratio:.2f}x)")
        print(f"| {concurrency} | {' | '.join(cells)} |", flush=True)
    print("\nTokens a second; in brackets, how many times as fast the embedded engine is.\n")


def describe(contenders: dict[str, Contender]) -> None:
    """Print start-up times and memory."""
    print("| | start to first answer, s | memory (PSS), GB |\n|---|---:|---:|")
    for kind, contender in contenders.items():
        print(f"| {NAMES[kind]} | {contender.start_seconds:.1f} | {contender.memory():.2f} |")
    print(flush=True)


def benchmark(
    model: Path, folder: Path, wanted: list[str], given: argparse.Namespace, *, update: bool
) -> None:
    """Measure and print all figures of one model."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    contenders = start(model, folder, wanted, given.dtype, given.threads)
    try:
        compare(contenders, vocab, given.rounds, given.concurrency)
        describe(contenders)
        if update:
            embedded = contenders["embedded"]
            assert isinstance(embedded, Server)
            with embedded.awake():
                rows = asyncio.run(measure_updates(embedded.endpoint, model, folder, vocab))
            print(f"| {' | '.join(UPDATE_COLUMNS)} |\n|{'---:|' * len(UPDATE_COLUMNS)}")
            for row in rows:
                print(f"| {' | '.join(row)} |")
    finally:
        stop(contenders)


def contenders_here() -> list[str]:
    """Return all contenders, without vLLM if it is not installed."""
    wanted = list(NAMES)
    try:
        found = find_vllm()
    except UsageError as error:
        print(error)
        found = None
    if found is None:
        print("vLLM is not installed (`buckeye vllm install`): it is left out.")
        wanted.remove("vllm")
    return wanted


def main() -> None:
    """Parse arguments, make the models, and print Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the smallest model, one round")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure (default 3)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="compute threads of each contender")
    parser.add_argument("--dtype", default="auto", help="of all contenders (default: the embedded engine's)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--only", nargs="+", choices=list(NAMES), help="contenders (embedded is always one)")
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="further models to measure")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if given.quick:
        given.rounds, given.sizes = 1, given.sizes[:1]
    wanted = contenders_here() if given.only is None else [k for k in NAMES if k in {"embedded", *given.only}]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in given.sizes:
            benchmark(make_model(folder, size), folder, wanted, given, update=size in ("3M", "135M"))
        for model in given.model:
            benchmark(model, folder, wanted, given, update=False)


if __name__ == "__main__":
    main()
