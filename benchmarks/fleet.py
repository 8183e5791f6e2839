"""Simulate a fleet of engines with the real scheduling code, on virtual time.

    python benchmarks/fleet.py [--engines 1 16 256] [--rollouts 10 1000 10000] [--steps 4] [--failures 0.1]
    python benchmarks/fleet.py --check
    python benchmarks/fleet.py --workers 4 [--rollouts 100000]

Real: the collector, the rollout runner, the recording policy, the client's router and retries. Simulated: the
engines (their speed depends on the number of sequences; prompts, new weights and failures stall them), the
environments (tools whose latency has a heavy tail) and the trainer. `--rollouts` is the number in flight.
`--failures` is the number of failures of each engine in a step.

Prints for each size the processor time per rollout, the largest part of it without a pause (a bound on how
late the real event loop would be), the memory, and what the fleet did.

With `--check`, engines that only sleep run layouts in real time. Laws are fitted to the rollouts of the first
layout, and predict the seconds per step of the others. Prints the errors.

With `--workers`, that many rollout workers (`orchestrator.workers`) run two batches in real time, with
simulated engines in each worker. Prints the processor time of all processes per rollout, and how late the
event loops are. Fails if a rollout is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import psutil

from buckeye.base.process import die_with_parent
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.evaluation.layouts import fit_engine, fit_laws
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.client.follower import FollowingClient
from buckeye.inference.client.replica import ReplicaLostError
from buckeye.monitor.rollouts import RecordedRollout
from buckeye.orchestrator.collector import GroupCollector
from buckeye.orchestrator.coroutines import collect_garbage
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.loop_watch import SWITCH_SECONDS, LoopWatch
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.rollout_runner import recording_runner
from buckeye.orchestrator.rollout_worker import LostServerReport, Parts, serve
from buckeye.orchestrator.rollout_workers import RolloutWorkers
from buckeye.orchestrator.simulation import (
    EngineLaw,
    Laws,
    RolloutLaw,
    Simulated,
    SimulatedEnvironment,
    SimulatedRenderer,
    SimulatedReplica,
    Simulation,
    VirtualTime,
    simulate,
)
from buckeye.orchestrator.task_sampler import TaskSampler
from buckeye.orchestrator.worker_messages import Setup

GROUP = 8
_DOWN_SECONDS = 30.0
_MIN_ROLLOUTS = 3000


def tool_rollouts(
    rng: random.Random,
    size: int,
    *,
    turns: int = 5,
    prompt: int = 400,
    reply: tuple[float, float] = (4.6, 0.8),
    tool: tuple[float, float, float] = (0.4, 1.3, 300.0),
) -> Sequence[RolloutLaw]:
    """Draw a group of rollouts with up to `turns` turns, log-normal replies, and Pareto times of tools."""
    count, (scale, shape, most) = rng.randint(1, turns), tool
    return [
        RolloutLaw(
            prompt_tokens=prompt,
            reply_tokens=tuple(1 + int(rng.lognormvariate(*reply)) for _ in range(count)),
            environment_seconds=(0.0, *(min(most, scale * rng.paretovariate(shape)) for _ in range(count))),
        )
        for _ in range(size)
    ]


def laws(engines: int, rollouts: int) -> Laws:
    """Return laws in which an engine decodes 256 sequences at 20 tokens/s each."""
    engine = EngineLaw(base=0.012, each=0.00015, prefill=2e-5, update=1.0, max_num_seqs=256)
    return Laws(
        engine=engine, draw=tool_rollouts, train=lambda tokens: tokens / 4000 / engines, hand_over=1.0
    )


class Lateness:
    """Longest and mean processor time between two steps of the clock."""

    def __init__(self, loop: VirtualTime) -> None:
        self.seconds: list[float] = []
        run_once = loop._run_once  # type: ignore[attr-defined]

        def timed() -> None:
            began = time.thread_time()
            run_once()
            self.seconds.append(time.thread_time() - began)

        loop._run_once = timed  # type: ignore[attr-defined]


async def _fail(replica: SimulatedReplica, every: float, rng: random.Random, simulation: Simulation) -> None:
    while True:
        await asyncio.sleep(rng.expovariate(1 / every))
        replica.exclude("a simulated failure")
        for done in replica.requests_by_id.values():
            if not done.done():
                done.set_exception(ReplicaLostError("a simulated failure", at=replica.url))
        replica.end_early()
        await asyncio.sleep(_DOWN_SECONDS)
        replica.down_reason = None
        simulation.client._router.resume()


def measure(engines: int, rollouts: int, steps: int, failures: float) -> None:
    """Simulate a fleet, and print one row."""
    batch = max(GROUP, rollouts // 2 // GROUP * GROUP)  # one step ahead: two batches are in flight
    steps = max(steps, _MIN_ROLLOUTS // batch)
    config = OrchestratorConfig(batch_size=batch, rollouts_per_example=GROUP, max_async_level=1)
    gc.collect()
    before, cpu = psutil.Process().memory_info().rss, time.process_time()
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        late = Lateness(runner.get_loop())  # type: ignore[arg-type]

        async def run() -> Simulated:
            simulation = Simulation(config, laws(engines, rollouts), engines=engines)
            rng, background = random.Random(1), [asyncio.create_task(collect_garbage())]
            if failures:
                background += [
                    asyncio.create_task(_fail(replica, 60 / failures, rng, simulation))
                    for replica in simulation.replicas
                ]
            result = await simulation.run(steps)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            gc.unfreeze()
            return result

        found = runner.run(run())
    cpu = time.process_time() - cpu
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    ordered = sorted(late.seconds)
    cells = (
        engines,
        f"{rollouts:,}",
        f"{1000 * cpu / found.attempts:.2f}",
        f"{1000 * ordered[int(0.99 * (len(ordered) - 1))]:.1f} / {1000 * ordered[-1]:.0f}",
        f"{max(0, grown) / 2**20:.0f}",
        f"{found.step_seconds:.0f}",
        f"{found.tokens_per_second:,.0f}",
        f"{found.engine_idle:.0%}",
        f"{found.trainer_idle:.0%}",
        f"{found.staleness:.2f}",
        f"{found.dropped:.1%}",
        found.unaccounted,
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


# --- check: sleeping engines in real time, and predictions from one layout ---

LAYOUTS = [
    *((1, 0, 32), (1, 0, 64), (1, 1, 32), (1, 2, 32), (2, 0, 32)),
    *((2, 1, 32), (2, 1, 64), (2, 2, 64), (4, 1, 32), (4, 1, 64)),
]
"""Layouts of the check: engines, steps ahead, and rollouts of a batch. The first one is observed."""


_TRUE = {"train_seconds": 1.8, "hand_over": 0.15}
_UPDATE = 0.15


def check(steps: int) -> None:
    """Print measured and predicted seconds per step of all layouts."""
    with ProcessPoolExecutor(len(LAYOUTS)) as pool:
        measured = list(pool.map(_in_real_time, LAYOUTS, [steps] * len(LAYOUTS)))
    rows = measured[0][1]
    engine = fit_engine([rows], engines=LAYOUTS[0][0], max_num_seqs=64, update=_UPDATE)
    fitted = fit_laws(rows, engine, **_TRUE)
    print(f"fitted: {fitted.engine}\n", file=sys.stderr)
    print("| engines | steps ahead | batch | measured, s | predicted, s | error |")
    print("|---:|---:|---:|---:|---:|---:|")
    errors = []
    for layout, (seconds, _) in zip(LAYOUTS, measured, strict=True):
        found = simulate(_config(layout), fitted, engines=layout[0], steps=2 * steps, seed=2)
        errors.append(found.step_seconds / seconds - 1)
        cells = (*layout, f"{seconds:.2f}", f"{found.step_seconds:.2f}", f"{errors[-1]:+.1%}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"median error {statistics.median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}")


def _config(layout: tuple[int, int, int]) -> OrchestratorConfig:
    _, level, batch = layout
    return OrchestratorConfig(batch_size=batch, rollouts_per_example=GROUP, max_async_level=level)


_short_rollouts = partial(tool_rollouts, turns=3, prompt=20, reply=(4.0, 0.6), tool=(0.15, 1.5, 6.0))


def _in_real_time(layout: tuple[int, int, int], steps: int) -> tuple[float, list[RecordedRollout]]:
    """Return the seconds per step and the rollouts of a layout, with engines that sleep."""
    engine = EngineLaw(base=0.006, each=0.0003, update=_UPDATE, max_num_seqs=64)
    true = Laws(
        engine=engine,
        draw=_short_rollouts,
        train=lambda tokens: _TRUE["train_seconds"],
        hand_over=_TRUE["hand_over"],
    )

    async def run() -> tuple[float, list[RecordedRollout]]:
        simulation = Simulation(_config(layout), true, engines=layout[0], seed=1)
        result = await simulation.run(steps)
        return result.step_seconds, _observed(simulation)

    return asyncio.run(run())


def _observed(simulation: Simulation) -> list[RecordedRollout]:
    return [
        RecordedRollout(
            group=group.index,
            task_id=rollout.task.id,
            ended=rollout.end_time,
            seconds=rollout.seconds,
            calls=list(rollout.calls),
        )
        for batch in simulation.batches
        for group in batch.groups
        for rollout in group.rollouts
    ]


# --- workers: rollout workers in real time, with simulated engines in each of them ---

_ENGINES = 20
_URLS = [f"http://simulated-{index}" for index in range(_ENGINES)]


def _slow_replicas(config: OrchestratorConfig) -> list[SimulatedReplica]:
    """Return engines so slow that all rollouts have started before many end."""
    law = EngineLaw(base=config.batch_rollouts / 4_000, max_num_seqs=1 << 18)
    return [SimulatedReplica(index, law) for index in range(_ENGINES)]


def _environment() -> NamedEnvironment:
    draw = partial(tool_rollouts, turns=1, prompt=100, reply=(3.2, 0.3), tool=(1.0, 1.3, 60.0))
    laws = Laws(engine=EngineLaw(), draw=draw, train=lambda tokens: 0.0)
    environment: Any = SimulatedEnvironment(laws, random.Random(0), GROUP)
    return NamedEnvironment(name="simulated", environment=environment)


def _worker_parts(setup: Setup, report_lost: LostServerReport) -> Parts:
    config = OrchestratorConfig.model_validate_json(setup.config)
    client = FollowingClient(_URLS, api_key=None, timeout=1e9, model="simulated", on_lost=report_lost)
    client._replicas[:] = _slow_replicas(config)
    renderer: Any = SimulatedRenderer()
    params = SamplingParams(max_tokens=1 << 30)
    runner = recording_runner(config, client, renderer, seed=setup.seed, params=params)
    return Parts(TaskSampler([_environment()], seed=0), runner, client)


async def measure_workers(count: int, rollouts: int) -> None:
    """Run two batches with rollout workers, and print their cost."""
    batch = rollouts // 2 // GROUP * GROUP
    limits: dict[str, Any] = {"seq_len": 1 << 30, "rollout_timeout": 1e6}
    config = OrchestratorConfig(batch_size=batch, rollouts_per_example=GROUP, workers=count, **limits)
    client = InferenceClient(_URLS, api_key=None, timeout=1e9, model="simulated")
    client._replicas[:] = _slow_replicas(config)
    workers = RolloutWorkers(config, client, seed=0, version=lambda: 0, program=(__file__, "--worker"))
    pauses = EnvironmentPauses(["simulated"], config.env_pause, config.output_dir)
    collector = GroupCollector(TaskSampler([_environment()], seed=0), workers, config, pauses, state={})
    watch, most, began = LoopWatch(), 0, time.monotonic()
    async with workers:
        running, processes = asyncio.create_task(workers.run()), list(map(psutil.Process, workers.pids()))
        collecting = asyncio.create_task(collector.collect(0))
        watch.start()
        while not collecting.done():
            await asyncio.wait({collecting}, timeout=1.0)
            most = max(most, workers.requests_in_flight)
        batches = [await collecting, await collector.collect(1)]
        spent = [time.process_time(), *(sum(p.cpu_times()[:2]) for p in processes)]
        memory = [p.memory_info().rss / 2**20 for p in (psutil.Process(), *processes)]
        metrics, late = workers.metrics(), watch.take_lateness()
        watch.stop()
        trained = sum(len(found.rollouts) for found in batches)
        print(
            f"{trained:,} rollouts in {time.monotonic() - began:.0f} s, at most {most:,} requests at a time"
        )
        for name, values in (("processor s", spent), ("MiB", memory)):
            print(f"{name}: orchestrator {values[0]:.0f}, workers", *(f"{value:.0f}" for value in values[1:]))
        each = [1000 * seconds / workers.attempts for seconds in (spent[0], sum(spent[1:]))]
        print(f"ms a rollout: orchestrator {each[0]:.2f}, workers {each[1]:.2f}")
        for name, value in (late | metrics).items():
            print(f"{name} {value:.3f}")
        print(f"load {psutil.getloadavg()[0]:.1f}; unaccounted {collector.unaccounted}")
        running.cancel()
        await collector.close()
        if collector.unaccounted or trained < 2 * batch:
            raise SystemExit("rollouts were lost")


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--rollouts", nargs="+", type=int, default=[10, 1000, 10000])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--failures", type=float, default=0.0)
    parser.add_argument("--check", action="store_true", help="compare predictions with sleeping engines")
    parser.add_argument("--workers", type=int, help="number of rollout workers, in real time")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workers or args.worker:
        sys.setswitchinterval(SWITCH_SECONDS)
    if args.worker:
        die_with_parent()
        asyncio.run(serve(args.worker, _worker_parts))
        return
    if args.workers:
        asyncio.run(measure_workers(args.workers, args.rollouts[-1]))
        return
    if args.check:
        check(max(args.steps, 16))
        return
    names = "engines | in flight | ms a rollout | p99 / max ms | MiB | step, s | tokens/s | engines idle"
    print(f"| {names} | trainer idle | staleness | dropped | unaccounted |")
    print(f"|{'---:|' * 12}")
    for engines in args.engines:
        for rollouts in args.rollouts:
            measure(engines, rollouts, args.steps, args.failures)


if __name__ == "__main__":
    main()
