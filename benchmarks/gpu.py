"""Training, sampling and whole steps on one NVIDIA GPU. Needs no network: the model has the shapes of
Qwen3-0.6B and random weights.

    python benchmarks/gpu.py [--only trainer engine/16 rl] [--json results.json]
    python benchmarks/gpu.py --device cpu --tiny          a small model, to see that everything runs

trainer  optimizer steps on two random samples of 2k, 16k or 64k tokens, all weights or LoRA of rank 16, every
         layer's activations recomputed, weights in float32, products in bfloat16. The median of three steps
         after a first one.
engine   the embedded engine without HTTP: 1 to 512 sequences of 2,048 tokens at the same time.
rl       the `rl` launcher: batches of 128, 16 rollouts per example, 2,048 tokens, tasks of letters.py.
         Sampling and training share the GPU if there is only one.

Model FLOP utilisation (MFU) = FLOPs / seconds / the GPU's dense bfloat16 peak of its data sheet, with
FLOPs = 6 P T + 6 L H D sum(t^2): P elements of the matrices, of which frozen ones count 4 instead of 6, T
tokens in samples of t each, L layers of H heads of size D (PaLM, appendix B, halved for causal attention).
Recomputing is no useful work and does not count.

Every case is a process of its own. One that fails (out of memory, say) or passes its deadline is reported,
and the others go on; then the exit code is 1.
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

CASES = Path(__file__).with_name("gpu_cases.py")
DEADLINES = {"model": 600.0, "trainer": 900.0, "engine": 900.0, "rl": 2400.0}
STOP_SECONDS = 30.0
# Tokens a second and GiB of Qwen3-0.6B on one H100, from benchmarks/results/BENCHMARKS.md (2026-02-01) of
# prime-rl: the same samples and recomputation, but compiled, and with FlashAttention-3.
PUBLISHED = {
    "trainer/16k/full": (11_900, 12.5),
    "trainer/64k/full": (10_100, 19.6),
    "trainer/16k/lora": (13_300, 5.1),
    "trainer/64k/lora": (10_000, 11.5),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. `part` is what to call in gpu_cases.py, with `settings`."""

    name: str
    part: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case: its figures, or what went wrong."""

    name: str
    part: str
    seconds: float
    figures: dict[str, Any] | None = None
    error: str | None = None


def all_cases(*, tiny: bool, compiled: bool, backend: str) -> list[Case]:
    """Every case of the benchmark, or of its small form."""
    lengths = {"64": 64, "256": 256} if tiny else {"2k": 2048, "16k": 16384, "64k": 65536}
    trainer = [
        Case(
            name=f"trainer/{name}/{'lora' if lora else 'full'}",
            part="trainer",
            settings={"length": length, "samples": 2, "steps": 3, "lora": lora, "compile": compiled},
        )
        for lora in (False, True)
        for name, length in lengths.items()
    ]
    engine = [
        Case(
            name=f"engine/{concurrency}",
            part="engine",
            settings={"concurrency": concurrency, "new_tokens": 16 if tiny else 2048},
        )
        for concurrency in ((1, 4) if tiny else (1, 16, 128, 512))
    ]
    size = {"batch": 4, "group": 2, "length": 64} if tiny else {"batch": 128, "group": 16, "length": 2048}
    rl = Case(name="rl", part="rl", settings={**size, "steps": 1 if tiny else 3, "backend": backend})
    return [*trainer, *engine, rl]


def chosen(cases: Sequence[Case], wanted: Sequence[str]) -> list[Case]:
    """The cases that have these names, or names that begin with them. Raises ValueError if one has none."""
    unknown = [name for name in wanted if not any(_is_under(case.name, name) for case in cases)]
    if unknown:
        raise ValueError(f"no case is called {', '.join(unknown)}: {', '.join(c.name for c in cases)}")
    return [case for case in cases if any(_is_under(case.name, name) for name in wanted)]


def _is_under(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}/")


def run_case(
    case: Case, folder: Path, *, deadline: float, command: Sequence[str] = (sys.executable, str(CASES))
) -> Outcome:
    """Measure in a new process. Its folder under `folder` keeps what it printed."""
    own = folder / case.name.replace("/", "_")
    own.mkdir(parents=True)
    settings, result, log = own / "settings.json", own / "result.json", own / "log"
    settings.write_text(json.dumps({**case.settings, "folder": str(own)}), encoding="utf-8")
    environment = os.environ | {"BUCKEYE_PARENT_PID": str(os.getpid())}  # it ends with us
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
    outcome = Outcome(name=case.name, part=case.part, seconds=time.monotonic() - started, error=error)
    if error is not None:
        return outcome
    return Outcome(**{**asdict(outcome), "figures": json.loads(result.read_text(encoding="utf-8"))})


def _wait(process: subprocess.Popen[bytes], deadline: float, log: Path) -> str | None:
    """What went wrong, if anything did."""
    try:
        code = process.wait(deadline)
    except subprocess.TimeoutExpired:
        return f"not done within {deadline:g} s"
    return None if code == 0 else _reason(log, code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children: SIGTERM, after a while SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: Path, code: int) -> str:
    """Why a process failed, from what it printed."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    memory = next((line for line in reversed(lines) if "out of memory" in line.lower()), None)
    last = next((line for line in reversed(lines) if line), "it printed nothing")
    return f"exit code {code}: {(memory or last)[:300]}"


def trainer_row(outcome: Outcome, *, published: bool) -> str:
    """A line of the trainer's table."""
    _, length, kind = outcome.name.split("/")
    trained = "LoRA, rank 16" if kind == "lora" else "all weights"
    theirs = PUBLISHED.get(outcome.name) if published else None
    other = f"{theirs[0]:,} / {theirs[1]}" if theirs else "-"
    f = outcome.figures
    if f is None:
        return f"| {length} | {trained} | {outcome.error} | | | | {other} |"
    attention = "" if f["flash"] else ", no flash attention"
    mfu = "-" if f["mfu"] is None else f"{f['mfu']:.1%}"
    speed = f"{f['tokens_per_second']:,.0f} | {mfu} | {f['gflops_per_second'] / 1000:,.1f}"
    return f"| {length} | {trained}{attention} | {speed} | {f['peak_gib']:.1f} | {other} |"


def engine_row(outcome: Outcome) -> str:
    """A line of the engine's table."""
    label = f"| {outcome.name.partition('/')[2]} "
    f = outcome.figures
    if f is None:
        return f"{label}| {outcome.error} | | | |"
    peak = "-" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}"
    return f"{label}| {f['tokens_per_second']:,.0f} | {f['step_ms']:.2f} | {f['slots']} | {peak} |"


def rl_table(outcome: Outcome) -> str:
    """What a run showed."""
    f = outcome.figures
    if f is None:
        return f"The run failed: {outcome.error}"
    share = (
        ""
        if f["inference_share"] is None
        else f", {f['inference_share']:.0%} of the memory for keys and values"
    )
    rows = {
        "devices": f"inference {f['inference_gpu_ids']}{share}; trainer {f['trainer_gpu_ids']}",
        "seconds a step": f"{f['step_seconds']:.2f}",
        "tokens a second": f"{f['tokens_per_second']:,.0f}",
        "samples and tokens of a batch": f"{f['samples']:.0f}, {f['tokens']:,.0f}",
        "trainer waits, computes, publishes (s)": " / ".join(
            f"{f[f'{cause}_seconds']:.2f}" for cause in ("wait", "compute", "publish")
        ),
        "KL between engine and trainer": f"{f['mismatch_kl']:.2e}",
        "trainer's peak memory (GiB)": f"{f['peak_gib']:.1f}",
    }
    return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows.items())])


HEADS = {
    "trainer": (
        "\n| sequence length | trained | tokens/s | MFU | TFLOP/s | peak GiB | published, H100 |"
        "\n|---:|---|---:|---:|---:|---:|---:|"
    ),
    "engine": "\n| sequences | tokens/s | ms a token | slots | peak GiB |\n|---:|---:|---:|---:|---:|",
    "rl": "",
}
TITLES = {"trainer": "Trainer", "engine": "Embedded engine", "rl": "Whole steps"}


def measure(cases: Sequence[Case], folder: Path, given: argparse.Namespace) -> list[Outcome]:
    """Make the model, then measure and print case after case."""
    size = "tiny" if given.tiny else "0.6B"
    common = {"model": str(folder / "model_files"), "device": given.device, "size": size}

    def run(case: Case) -> Outcome:
        full = Case(name=case.name, part=case.part, settings={**common, **case.settings})
        return run_case(full, folder, deadline=given.deadline or DEADLINES[case.part])

    model = run(Case(name="model", part="model"))
    if model.figures is None:
        print(f"The model could not be made: {model.error}")
        return [model]
    facts = model.figures
    print(
        f"{facts['parameters'] / 1e6:,.1f} M parameters on {facts['device']}, torch {facts['torch']}", end=""
    )
    print(f", peak {facts['peak_flops'] / 1e12:,.0f} TFLOP/s" if facts["peak_flops"] else ", peak not known")
    show: dict[str, Callable[[Outcome], str]] = {
        "trainer": lambda outcome: trainer_row(outcome, published=not given.tiny),
        "engine": engine_row,
        "rl": rl_table,
    }
    outcomes, part = [model], None
    for case in cases:
        if case.part != part:
            part = case.part
            print(f"\n## {TITLES[part]}\n{HEADS[part]}", flush=True)
        outcomes.append(run(case))
        print(show[case.part](outcomes[-1]), flush=True)
    return outcomes


def main() -> int:
    """Measure what is asked for; 1 if a case failed."""
    given = _arguments()
    cases = all_cases(tiny=given.tiny, compiled=given.compile, backend=given.backend)
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
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n", encoding="utf-8")
    failed = [outcome.name for outcome in outcomes if outcome.error is not None]
    if failed:
        print(f"\nFailed: {', '.join(failed)}. What they printed is in {folder}.")
    else:
        shutil.rmtree(folder)
    return int(bool(failed))


def _remove_models(folder: Path) -> None:
    """Delete the gigabytes that nobody needs any more, and leave what was printed."""
    for weights in list(folder.rglob("*.safetensors")):
        weights.unlink()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="cases: trainer, trainer/16k, engine/128, rl ...")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and short sequences")
    parser.add_argument("--compile", action="store_true", help="compile the model that is trained")
    parser.add_argument("--backend", choices=("torch", "vllm"), default="torch", help="the engine of `rl`")
    parser.add_argument("--deadline", type=float, help="seconds for each case (default: by kind)")
    parser.add_argument(
        "--folder", type=Path, help="where models are written (default: the temporary folder)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
