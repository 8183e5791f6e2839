"""Measure correctness, complete steps, training and sampling on one NVIDIA GPU.

Needs no network: the models have the shapes of Qwen3-0.6B and Qwen3-4B and random weights.

    benchmarks/gpu.sh [--only rl trainer/full] [--within 300]      on a machine with torch and wheels
    python benchmarks/gpu.py --device cpu --tiny                   small models, to check that all of it runs

    correctness   log-probs, loss and gradient against a CPU in float32; the engine's log-probs of its samples
                  against the trainer's; a weight update with its checksum (gpu_correctness.py).
    rl            the `rl` launcher: batches of 128, 16 rollouts per example, tasks of letters.py; sampling
                  and training share a single GPU. 2,048 or 128 tokens per rollout.
    trainer       optimizer steps on random samples of 2k, 16k or 64k tokens, all weights or LoRA of rank 16,
                  weights in float32, products in bfloat16; and of a 4B shape. The median after a first step.
    engine        the embedded engine without HTTP: 1 to 512 sequences with about 1,024 tokens of context,
                  compared with the time needed to read weights, keys and values; then `generate_batch` of
                  transformers.

Model FLOP utilization (MFU) = FLOPs / seconds / the GPU's dense bfloat16 peak of its data sheet, with FLOPs =
6 P T + 6 L H D sum(t^2): P elements of the matrices (frozen ones count 4 instead of 6), T tokens in samples
of t each, L layers of H heads of size D (PaLM, appendix B, halved for causal attention). Recomputed
activations do not count.

Each case is a separate process. The most important ones run first, and results are written after each. A case
that fails (out of memory, for example) or passes its deadline is reported; the others still run, and the exit
code is 1. Cases that would start after --within seconds are reported as not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu_correctness

CASES = Path(__file__).with_name("gpu_cases.py")
RESULTS = Path(__file__).with_name("results")
STOP_SECONDS = 15.0
# Tokens per second and GiB of Qwen3-0.6B on one H100, from benchmarks/results/BENCHMARKS.md (2026-02-01) of
# prime-rl: two samples, every layer recomputed, compiled, and with FlashAttention-3.
PUBLISHED = {
    "full/16k, recomputed": (11_900, 12.5),
    "full/64k, recomputed": (10_100, 19.6),
    "lora/16k, recomputed": (13_300, 5.1),
    "lora/64k, recomputed": (10_000, 11.5),
}

Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process, which calls `part` of gpu_cases.py with `settings`; `deadline` is in seconds."""

    name: str
    part: str
    deadline: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a case: the figures of its rows, and the error if it failed."""

    name: str
    part: str
    seconds: float
    rows: Rows = field(default_factory=dict)
    error: str | None = None


def all_cases(*, tiny: bool, backend: str, compiled: bool = False) -> list[Case]:
    """Return every case of the benchmark, or of its small form, by importance."""
    long = {"batch": 128, "group": 16, "length": 2048, "row": 16384, "steps": 2}
    long |= {"backend": backend, "compile": compiled}
    short = long | {"length": 128, "steps": 5}
    engine: dict[str, Any] = {"counts": [128, 512, 16, 1], "prompt": 896, "new_tokens": 256}
    rival = engine | {"counts": [128]}
    if tiny:
        long = long | {"batch": 4, "group": 2, "length": 64, "row": 256, "steps": 1}
        engine = {"counts": [4, 1], "prompt": 24, "new_tokens": 16}
        rival = engine | {"counts": [2]}
    cases = [Case(name="correctness", part="correctness", deadline=90)]
    cases.append(Case(name=f"rl/{long['length']}", part="rl", deadline=200, settings=long))
    if not tiny:
        cases.append(Case(name="rl/128", part="rl", deadline=90, settings=short))
    plans = {"full": {"lora": False}, "lora": {"lora": True}, "compiled": {"lora": False, "compile": True}}
    trainer = {
        kind: Case(
            name=f"trainer/{kind}",
            part="trainer",
            deadline=120,
            settings={**plan, "rows": _rows(tiny=tiny)},
        )
        for kind, plan in plans.items()
    }
    cases += [trainer["full"], trainer["lora"]]
    cases.append(Case(name="engine", part="engine", deadline=90, settings=engine))
    if not tiny:
        large = {"lora": False, "rows": _rows(tiny=False)[2:3], "size": "4B", "model": "4B"}
        cases.append(Case(name="trainer/4B", part="trainer", deadline=100, settings=large))
        cases.append(Case(name="generate_batch", part="rival", deadline=60, settings=rival))
        cases.append(trainer["compiled"])
    return cases


def _rows(*, tiny: bool) -> list[dict[str, Any]]:
    """Return the samples and step counts of a trainer case; those with recomputed activations come last."""
    if tiny:
        lengths: tuple[tuple[str, int, int, bool, int], ...] = (
            ("64", 64, 2, False, 2),
            ("256", 256, 1, True, 2),
        )
    else:
        lengths = (
            ("16k", 16384, 2, False, 2),
            ("2k", 2048, 4, False, 2),
            ("16k, recomputed", 16384, 2, True, 2),
            ("64k, recomputed", 65536, 1, True, 1),
        )
    keys = ("name", "length", "samples", "recompute", "steps")
    return [dict(zip(keys, row, strict=True)) for row in lengths]


def chosen(cases: Sequence[Case], wanted: Sequence[str]) -> list[Case]:
    """Return the cases whose names equal or begin with the given names.

    Raises ValueError if a name matches no case.
    """
    unknown = [name for name in wanted if not any(_is_under(case.name, name) for case in cases)]
    if unknown:
        raise ValueError(f"no case is called {', '.join(unknown)}: {', '.join(c.name for c in cases)}")
    return [case for case in cases if any(_is_under(case.name, name) for name in wanted)]


def _is_under(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}/")


def run_case(
    case: Case, folder: Path, *, deadline: float, command: Sequence[str] = (sys.executable, str(CASES))
) -> Outcome:
    """Measure in a new process, whose folder under `folder` keeps its output."""
    own = folder / case.name.replace("/", "_")
    own.mkdir(parents=True)
    settings, result, log = own / "settings.json", own / "result.json", own / "log"
    settings.write_text(json.dumps({**case.settings, "folder": str(own)}), encoding="utf-8")
    environment = os.environ | {"BUCKEYE_PARENT_PID": str(os.getpid())}  # it exits with this process
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, case.part, str(settings), str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            error = _wait(process, deadline, log)
        finally:
            _end(process)
    rows: Rows = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    return Outcome(name=case.name, part=case.part, seconds=time.monotonic() - started, rows=rows, error=error)


def _wait(process: subprocess.Popen[bytes], deadline: float, log: Path) -> str | None:
    """Return the error, or None if the process ended with exit code 0."""
    try:
        code = process.wait(deadline)
    except subprocess.TimeoutExpired:
        return f"not done within {deadline:.0f} s"
    return None if code == 0 else _reason(log, code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children with SIGTERM, and after a timeout with SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: Path, code: int) -> str:
    """Return the reason for a failure from the output of a process."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    memory = next((line for line in reversed(lines) if "out of memory" in line.lower()), None)
    last = next((line for line in reversed(lines) if line), "it printed nothing")
    return f"exit code {code}: {(memory or last)[:300]}"


# --- tables ---


def trainer_lines(outcome: Outcome, facts: dict[str, Any]) -> list[str]:
    """Return a table line for each row of a trainer case."""
    kind = outcome.name.partition("/")[2]
    lines = []
    for name, f in outcome.rows.items():
        theirs = PUBLISHED.get(f"{kind}/{name}") if facts["peak_flops"] else None
        other = f"{theirs[0]:,} / {theirs[1]}" if theirs else "-"
        if "error" in f:
            lines.append(f"| {kind} | {name} | {f['error']} | | | | | | {other} |")
            continue
        mfu = "-" if f["mfu"] is None else f"{f['mfu']:.1%}"
        attention = name if f["flash"] else f"{name}, no flash attention"
        memory = f"{_figure(f['peak_gib'])} | {_figure(f['forecast_gib'])}"
        step = f"{f['step_seconds']:.3f} | {_figure(f['forecast_seconds'])}"
        lines.append(
            f"| {kind} | {attention} | {f['tokens_per_second']:,.0f} | {mfu} | {step} | {memory} | {other} |"
        )
    return lines


def engine_lines(outcome: Outcome, facts: dict[str, Any]) -> list[str]:
    """Return a table line for each number of sequences."""
    lines = []
    for count, f in outcome.rows.items():
        whole = f"{f['with_prompts_per_second']:,.0f}"
        if outcome.part == "rival":
            lines.append(f"| {count}, generate_batch | - | {whole} | - | - | - | - |")
            continue
        limit = "-"
        if facts.get("bandwidth"):
            limit = f"{f['bytes_per_step'] / facts['bandwidth'] / (f['step_ms'] / 1000):.0%}"
        speed = f"{f['tokens_per_second']:,.0f} | {whole} | {f['step_ms']:.2f}"
        lines.append(f"| {count} | {speed} | {limit} | {f['slots']} | {_figure(f['peak_gib'])} |")
    return lines


def rl_lines(outcome: Outcome, facts: dict[str, Any]) -> list[str]:
    """Return a table line for each figure of a run."""
    f = outcome.rows.get("run")
    if f is None:
        return []
    shares = [f"{f[f'{cause}_seconds']:.2f}" for cause in ("wait", "compute", "publish")]
    rows = {
        "seconds a step": f"{f['step_seconds']:.2f}",
        "tokens a second": f"{f['tokens_per_second']:,.0f}",
        "samples and tokens of a batch": f"{f['samples']:.0f}, {f['tokens']:,.0f}",
        "trainer waits, computes, publishes (s)": " / ".join(shares),
        "share of the time without a kernel": _figure(f["idle_share"]),
        "KL between engine and trainer": f"{f['mismatch_kl']:.2e}",
        "trainer's peak memory (GiB)": _figure(f["peak_gib"]),
        "start to the end of the first step (s)": f"{f['first_step_after_seconds']:.1f}",
        "GPUs of inference and of the trainer": f"{f['inference_gpu_ids']}, {f['trainer_gpu_ids']}",
    }
    return [f"| {outcome.name} | {name} | {value} |" for name, value in rows.items()]


def correctness_lines(outcome: Outcome, facts: dict[str, Any]) -> list[str]:
    """Return every figure with its limit."""
    return gpu_correctness.lines(outcome.rows)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


Lines = Callable[[Outcome, dict[str, Any]], list[str]]
TABLES: dict[str, tuple[str, tuple[str, ...], str, Lines]] = {
    "correctness": (
        "Correctness",
        ("correctness",),
        "| | figure | value | limit |\n|---|---|---:|---:|",
        correctness_lines,
    ),
    "rl": ("Whole steps", ("rl",), "| run | figure | value |\n|---|---|---:|", rl_lines),
    "trainer": (
        "Trainer",
        ("trainer",),
        "| weights | samples | tokens/s | MFU | s/step | forecast | peak GiB | forecast | published, H100 |"
        "\n|---|---|---:|---:|---:|---:|---:|---:|---:|",
        trainer_lines,
    ),
    "engine": (
        "Embedded engine",
        ("engine", "rival"),
        "| sequences | tokens/s | with prompts | ms a token | of the limit | slots | peak GiB |"
        "\n|---|---:|---:|---:|---:|---:|---:|",
        engine_lines,
    ),
}


def page(outcomes: Sequence[Outcome]) -> str:
    """Return all results as Markdown."""
    facts = outcomes[0].rows.get("device", {})
    if not facts:
        return f"The device could not be described: {outcomes[0].error}\n"
    measured = f"Measured {facts.get('date', 'once')} with torch {facts['torch']}"
    parts = [f"# {facts['device']}\n\n{measured}, {facts['parameters'] / 1e6:,.1f} M parameters"]
    if facts.get("bandwidth"):
        parts[0] += (
            f"; a copy moves {facts['bandwidth'] / 1e12:.2f} TB/s, a bfloat16 product of 8,192 makes "
            f"{facts['product_flops'] / 1e12:,.0f} TFLOP/s; data sheet {facts['peak_flops'] / 1e12:,.0f}"
        )
    for title, names, head, lines in TABLES.values():
        found = [outcome for outcome in outcomes if outcome.part in names]
        body = [line for outcome in found for line in lines(outcome, facts)]
        if body:
            parts.append("\n".join([f"## {title}\n", head, *body]))
    errors = [f"- {o.name}: {o.error}" for o in outcomes if o.error is not None]
    seconds = ", ".join(f"{o.name} {o.seconds:.0f}" for o in outcomes if o.seconds)
    if errors:
        parts.append("\n".join(["## Not measured, or wrong\n", *errors]))
    return "\n\n".join([*parts, f"Seconds: {seconds}."]) + "\n"


def measure(cases: Sequence[Case], folder: Path, given: argparse.Namespace) -> list[Outcome]:
    """Describe the device, then run the cases; write the results after each."""
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for case in (Case(name="device", part="device", deadline=90), *cases):
        common = {"device": given.device, "size": "tiny" if given.tiny else "0.6B"}
        settings = {**common, **case.settings}
        settings["model"] = str(folder / "models" / settings.get("model", settings["size"]))
        left = given.within - (time.monotonic() - started)
        if left <= 0:
            outcomes.append(Outcome(name=case.name, part=case.part, seconds=0, error="no time was left"))
            continue
        full = Case(name=case.name, part=case.part, deadline=case.deadline, settings=settings)
        outcomes.append(run_case(full, folder, deadline=min(given.deadline or case.deadline, left)))
        last = outcomes[-1]
        print(f"{last.name}: {last.error or 'done'} ({last.seconds:.0f} s)", flush=True)
        _write(outcomes, given.results)
        if case.part == "device" and last.error is not None:
            break
    return outcomes


def _write(outcomes: Sequence[Outcome], results: Path) -> None:
    """Write the results as JSON and Markdown, named after the device."""
    name = outcomes[0].rows.get("device", {}).get("device", "unknown").replace(" ", "_")
    results.mkdir(parents=True, exist_ok=True)
    content = json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
    for suffix, text in ((".json", content), (".md", page(outcomes))):
        temporary = results / f".{name}{suffix}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(results / f"{name}{suffix}")


def main() -> int:
    """Run the chosen cases; return 1 if one failed."""
    given = _arguments()
    cases = all_cases(tiny=given.tiny, backend=given.backend, compiled=given.compile)
    try:
        cases = chosen(cases, given.only) if given.only else cases
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="buckeye_gpu_", dir=given.folder))
    try:
        outcomes = measure(cases, folder, given)
    finally:
        _remove_models(folder)
    print(f"\n{page(outcomes)}")
    failed = [outcome.name for outcome in outcomes if outcome.error is not None]
    if failed:
        print(f"Failed: {', '.join(failed)}. Their output is in {folder}.")
    else:
        shutil.rmtree(folder)
    return int(bool(failed))


def _remove_models(folder: Path) -> None:
    """Delete the weights; keep the logs."""
    for weights in list(folder.rglob("*.safetensors")):
        weights.unlink()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="cases: correctness, trainer, rl/128, engine ...")
    parser.add_argument("--within", type=float, default=300.0, help="seconds for all cases together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and short sequences")
    parser.add_argument("--backend", choices=("torch", "vllm"), default="torch", help="the engine of `rl`")
    parser.add_argument("--compile", action="store_true", help="compile the trainer's layers in `rl`")
    parser.add_argument("--deadline", type=float, help="seconds for each case (default: by case)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument(
        "--folder", type=Path, help="where models and logs are written (default: the temporary folder)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
