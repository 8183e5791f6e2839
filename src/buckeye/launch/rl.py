"""`rl`: start inference, orchestrator and trainer, supervise them, show progress, and stop them in order."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from buckeye.base.columns import counted, quoted
from buckeye.base.process import EXIT_INTERRUPTED, StopFlag, forbid_tracing
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.attempts import RunLaunch
from buckeye.launch.changed_settings import changed_settings, read_earlier_start, record_config
from buckeye.launch.child_warnings import ChildWarnings
from buckeye.launch.engines import other_nodes
from buckeye.launch.hosts import OtherNodes, make_plan_node
from buckeye.launch.plan import RolePlan, make_plan
from buckeye.launch.preflight.device_checks import forecast_run
from buckeye.launch.preflight.devices import gpus, this_machine
from buckeye.launch.preflight.disk import check_disk
from buckeye.launch.preflight.memory_check import find_hardware
from buckeye.launch.preflight.model import fetch_model
from buckeye.launch.preflight.model_checks import check_tokenizer
from buckeye.launch.preflight.model_shape import read_shape
from buckeye.launch.preflight.ports import Ports
from buckeye.launch.preflight.trainer_forecast import MEASURED_STEPS, TrainerForecast, compare
from buckeye.launch.preflight.turns import check_turns, settle_cache, settle_turns
from buckeye.launch.processes import TERM_GRACE_SECONDS, Child, Processes, write_role_configs
from buckeye.launch.progress import Progress, describe_time_left, describe_weights, human_duration
from buckeye.launch.recorder import Recorder
from buckeye.launch.resume import (
    RunOrigin,
    find_run_origin,
    resume_command,
    resume_hint,
    strip_command,
    wait_for_leftovers,
)
from buckeye.launch.run_keys import remove_unrelated_keys, rollout_environments
from buckeye.launch.supervisor import Supervisor
from buckeye.launch.uploads import open_uploads
from buckeye.launch.worker_hosts import plan_environment_processes
from buckeye.monitor.learning_findings import explain_no_learning, outcome_of
from buckeye.monitor.log import run_log, setup_logging
from buckeye.monitor.metrics import StepMetrics, read_run_metrics
from buckeye.monitor.rollouts import read_rollouts, rollout_lines, rollout_steps
from buckeye.monitor.tracker_threads import check_trackers, log_to_trackers
from buckeye.monitor.verdicts import training_log_level
from buckeye.run_files.directory import (
    REMOTE_FILE,
    DirectoryLostError,
    StopRequests,
    begin_attempt,
    check_unused,
    clean,
    lock_directory,
    move_unstarted_run,
)
from buckeye.run_files.known_runs import register_run
from buckeye.run_files.logs import LAUNCHER, prune_logs, was_logged
from buckeye.run_files.record import RunRecord
from buckeye.transport.checkpoint import Score, checkpoints_oldest_first, list_checkpoints, read_scores
from buckeye.transport.resume_from_store import restore_from_store

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_FORCED_STOP_SECONDS = 1.0
_MAX_SHOWN_CHARACTERS = 3000  # maximum shown characters of the text of a rollout


def run_rl(config: RLConfig, command: Sequence[str], on_start: Callable[[], None] = lambda: None) -> int:
    """Run the training to its end and return the exit code.

    `command` is the argv that the user typed; messages show it with `--resume`. `on_start` is called when the
    run has passed all checks and begins. Raises UsageError before any process starts, and RunError if a
    process fails.
    """
    output_dir = config.output_dir
    check_trackers(config.trackers(config.trainer.wandb))
    with lock_directory(output_dir), closing(Ports()) as ports:
        ckpt = config.trainer.ckpt
        if ckpt is not None and ckpt.store is not None:
            setup_logging(config.log.level, LAUNCHER, None)  # the download may be slow and logs its progress
            restore_from_store(output_dir, ckpt.store, ckpt.resume_step)
        origin = find_run_origin(config)
        needs_unused = not origin.is_resume and not config.clean
        if needs_unused:
            check_unused(output_dir, resume_command=resume_hint(config, command))
        wait_for_leftovers(output_dir)
        if needs_unused:  # a process of an earlier start may have finished a step during the wait
            check_unused(output_dir, resume_command=resume_hint(config, command))
        model_path = fetch_model(config.trainer.model.name)
        tokenizer = check_tokenizer(config)
        if tokenizer.state == "failed":  # earlier checks skip a model that is not downloaded yet
            raise UsageError(tokenizer.seen, code="BK-TOKENIZER", hint=tokenizer.do or None)
        if config.cluster.nodes > 1:  # without a log file, log the wait for nodes to the console
            setup_logging(config.log.level, LAUNCHER, None)
        with other_nodes(config) as nodes:
            return _run_planned(config, command, origin, model_path, ports, nodes, on_start)


def _run_planned(
    config: RLConfig,
    command: Sequence[str],
    origin: RunOrigin,
    model_path: Path,
    ports: Ports,
    nodes: OtherNodes,
    on_start: Callable[[], None],
) -> int:
    output_dir = config.output_dir
    turns = []
    if config.colocate is True:
        shape, hardware = read_shape(model_path), find_hardware(config, gpus())
        turns = check_turns(config, shape, hardware)
        config = settle_turns(config, shape, hardware)
    elif {*config.inference_gpu_ids} & {*config.trainer_gpu_ids}:
        config = settle_cache(config, read_shape(model_path), find_hardware(config, gpus()))
    plan_nodes = {number: make_plan_node(number, host) for number, host in sorted(nodes.hosts.items())}
    plan = make_plan(
        config,
        this_machine(),
        model_path=model_path,
        ports=ports,
        other_nodes=list(plan_nodes.values()),
        address=nodes.address,
    )
    disk = check_disk(config, plan.disk)
    if disk.state == "failed":
        raise UsageError(disk.seen, code="BK-DISK-FULL", hint=disk.do)
    ports.reserve(plan.fixed_ports)
    archive = None
    if not origin.is_resume and config.clean:
        clean(output_dir, needed=[model_path])
    elif not origin.is_resume:
        archive = move_unstarted_run(output_dir, needed=[model_path])
    earlier = read_earlier_start(output_dir) if origin.is_resume else None
    identity = begin_attempt(output_dir, resumed_step=origin.step)
    on_start()
    (output_dir / REMOTE_FILE).unlink(missing_ok=True)  # an earlier attempt may have run on another machine
    prune_logs(output_dir, config.disk.keep_logs)
    setup_logging(config.log.level, LAUNCHER, run_log(output_dir))
    for check in turns:
        log.info("Colocated: %s", check.seen)
    if disk.state == "warning":
        log.warning("%s", disk.seen)
    if origin.is_resume:
        _log_origin(origin, config, earlier)
    if archive is not None:
        log.info("Moved the files of an earlier start without a finished step to %s", archive)
    if earlier is None:
        record_config(config)
    write_role_configs(config, plan, model_path=model_path, step=origin.step)
    register_run(output_dir, identity.run_id)
    launch = RunLaunch(
        config=config, model_path=model_path, first_attempt=identity, step=origin.step, nodes=nodes
    )
    environment_processes = plan_environment_processes(
        rollout_environments(config),
        rollouts=config.orchestrator.max_concurrent_rollouts,
        plan_nodes=plan_nodes,
        address=nodes.address,
    )
    plan = replace(plan, roles=(*environment_processes.roles, *plan.roles))
    uploads = open_uploads(output_dir, config.trainer.ckpt)  # needs keys that remove_unrelated_keys deletes
    forbid_tracing()
    remove_unrelated_keys(config)
    trackers = config.trackers(config.trainer.wandb)
    with log_to_trackers(trackers, output_dir=output_dir, run_id=identity.run_id, config=config):
        return _run_recorded(launch, plan, command, environment_processes.env, earlier, uploads)


def _log_origin(origin: RunOrigin, config: RLConfig, earlier: RunRecord | None) -> None:
    if origin.step is None:
        log.warning("The run has no checkpoint yet: starting from step 0")
    else:
        log.info("Resuming from the checkpoint of step %d", origin.step)
        checkpoints = list_checkpoints(config.output_dir / "checkpoints")
        later = ", ".join(str(info.step) for info in checkpoints if info.step > origin.step)
        if later:
            log.warning("The run also has checkpoints of later steps: %s", later)
    for line in changed_settings(config.output_dir, config) if earlier is not None else ():
        log.warning("Setting changed since the last start: %s", line)


def _run_recorded(
    launch: RunLaunch,
    plan: RolePlan,
    command: Sequence[str],
    env: Mapping[str, str],
    earlier: RunRecord | None,
    uploads: AbstractContextManager[Any],
) -> int:
    started = time.monotonic()
    recorder = Recorder(
        launch.config, launch.first_attempt, strip_command(command), launch.step, earlier=earlier
    )
    try:
        with uploads as uploader:
            code = _run(launch, plan, command, recorder, env)
        if uploader is not None and uploader.pending_steps and code != EXIT_INTERRUPTED:
            raise RunError(
                "all steps are done, but checkpoints are missing in the store (`ckpt.store`): steps "
                + ", ".join(map(str, uploader.pending_steps)),
                code="BK-STORE",
                hint=f"upload them with: {resume_command(command)}",
            )
        problem = None if code == EXIT_INTERRUPTED else _log_result(launch.config, time.monotonic() - started)
    except DirectoryLostError:
        raise
    except BaseException as error:
        recorder.record_end("failed", str(error) or type(error).__name__)
        raise
    recorder.record_end("stopped" if code == EXIT_INTERRUPTED else "finished", problem)
    return 1 if problem is not None and launch.config.strict else code


def _log_result(config: RLConfig, seconds: float) -> str | None:
    """Log the result of a finished run. Return the reason if the model learned nothing, else None.

    The reason has no advice, which names the directory: the run may be moved.
    """
    steps = read_run_metrics(config.output_dir / "metrics.jsonl").steps()
    problem = explain_no_learning(steps, config.output_dir, is_known=lambda cause: True)
    outcome = outcome_of(steps)
    if outcome is not None:
        log.info("Outcome: %s", outcome)
    if problem is None and outcome is not None and outcome.is_flat:
        log.warning("Outcome: the reward has not clearly risen")
    if problem is not None:
        is_known = partial(was_logged, config.output_dir)
        log.warning("Outcome: %s", explain_no_learning(steps, config.output_dir, is_known=is_known))
    log.log(_result_level(steps), "RL training finished!")
    try:
        for line in evaluation_lines(read_scores(config.output_dir)):
            log.info("%s", line)
    except UsageError as error:  # a damaged score file must not fail a finished run
        log.warning("%s", error)
    is_adapter = config.trainer.model.experimental.lora is not None
    log.info("%s | %s", human_duration(seconds), describe_weights(config.output_dir, is_adapter=is_adapter))
    return problem


def evaluation_lines(scores: Sequence[Score]) -> Iterator[str]:
    """Yield one line per environment, with its first and its last evaluation and confidence intervals.

    Evaluations of abandoned weights are left out.
    """
    by_environment: dict[str, list[Score]] = {}
    for score in (score for score in scores if not score.is_abandoned):
        by_environment.setdefault(score.environment, []).append(score)
    for name, (*earlier, last) in by_environment.items():
        texts = [f"{_describe_score(score)} at step {score.step}" for score in (*earlier[:1], last)]
        yield f"Evaluation of {name} ({counted(last.rollouts, 'rollout')}): {', '.join(texts)}"


def _describe_score(score: Score) -> str:
    text = f"reward {score.mean_reward:.4f}"
    if score.exact is not None:
        exact, low, high = (100 * value for value in score.exact)
        text += f", full reward {exact:.1f}% [{low:.1f}, {high:.1f}]"
    return text


def _run(
    launch: RunLaunch,
    plan: RolePlan,
    command: Sequence[str],
    recorder: Recorder,
    env: Mapping[str, str],
) -> int:
    stop = StopFlag().install()
    stop_requests = StopRequests(launch.config.output_dir, stop)
    config, identity = launch.config, launch.first_attempt
    log.info("Starting RL run %s (attempt %d) in %s", identity.run_id, identity.attempt, config.output_dir)
    shared = _run_environment(config)
    processes = Processes(config.output_dir, {**shared, **env}, nodes=launch.nodes.hosts, shared_env=shared)
    processes.set_attempt(identity)
    forecast = forecast_run(config, launch.model_path, gpus() if plan.on_gpu else [])
    progress = Progress(
        config.output_dir / "metrics.jsonl", max_steps=config.trainer.max_steps, forecast=forecast
    )
    warnings = ChildWarnings(run_log(config.output_dir), own_process=LAUNCHER)
    supervisor = Supervisor(launch, plan, processes, recorder)
    shows_first = identity.attempt == 1 and config.orchestrator.rollouts.show_first
    try:
        supervisor.start()
        while not stop_requests.requested():
            if shows_first and (first := _first_rollout(config)):
                progress.clear()
                log.info("First rollout of the first batch (all: `buckeye rl rollouts`):\n%s", first)
                shows_first = False
            progress.print_lines(warnings.read_new())
            progress.update("starting: waiting for the first step (details in logs/)")
            if forecast is not None and len(progress.first_trained) == MEASURED_STEPS:
                progress.clear()
                _compare_forecast(forecast, progress, config.trainer.max_steps, recorder)
                forecast = None
            if supervisor.tick(step=progress.step, trained=progress.trained):
                progress.update("", ended=True)
                progress.print_lines(warnings.read_new())
                break
            time.sleep(_POLL_SECONDS)
        progress.clear()
        _log_suppressed(warnings, config)
        if stop_requests.requested():
            recorder.record_stop_request()
            return _stop_early(config, processes, stop, command)
    except DirectoryLostError:  # the processes must not write to the directory of another run
        progress.clear()
        for child in processes.children:
            processes.kill(child, "lost its directory")
        raise
    except Exception:
        progress.print_lines(warnings.read_new())
        progress.clear()
        _log_suppressed(warnings, config)
        log.warning(
            "Stopping all processes: the trainer finishes its step and writes a checkpoint "
            "(Ctrl-C: stop immediately)"
        )
        _end_trainers(processes, stop, config.stop_seconds)
        raise
    finally:
        processes.stop_all()
    return 0


def _compare_forecast(
    forecast: TrainerForecast, progress: Progress, max_steps: int | None, recorder: Recorder
) -> None:
    """Log and record the forecast of the first steps, what happened, and the corrected forecast."""
    comparison = compare(forecast, progress.first_trained)
    steps = 0 if max_steps is None else max_steps - progress.step
    left = f", {describe_time_left(comparison.rest, steps)}" if steps > 0 else ""
    for line in (*comparison.lines[:-1], comparison.lines[-1] + left):
        log.info("%s", line)
    recorder.note("forecast", **comparison.values)


def _first_rollout(config: RLConfig) -> str:
    """Return the text of the run's first rollout, or "" if no step has rollouts yet."""
    steps = rollout_steps(config.output_dir)
    rollouts, _ = read_rollouts(config.output_dir, steps[0]) if steps else ([], 0)
    return "\n".join(rollout_lines(rollouts[0], _MAX_SHOWN_CHARACTERS)) if rollouts else ""


def _result_level(steps: Sequence[StepMetrics]) -> int:
    """Return the log level of the final message: WARNING if the trainer skipped nearly all steps, else INFO.

    Steps with an empty batch count as skipped.
    """
    trained = [step for step in steps if step.trained is not None]
    skipped = sum(bool(step.value("trainer/skipped")) for step in trained)
    empty = max((int(step.value("trainer/empty_steps") or 0) for step in trained), default=0)
    return training_log_level(len(trained), left_out=min(len(trained), skipped + empty))


def _log_suppressed(warnings: ChildWarnings, config: RLConfig) -> None:
    if warnings.suppressed_count:
        log.info(
            "Repeated warnings that are not shown: %d (all: `buckeye rl logs %s`)",
            warnings.suppressed_count,
            quoted(config.output_dir),
        )


def _run_environment(config: RLConfig) -> dict[str, str]:
    """Return the environment variables for all processes on all nodes.

    They contain one key, for requests to the inference servers of the run.
    """
    key = os.environ.get("BUCKEYE_INFERENCE_KEY") or secrets.token_urlsafe(24)
    return {
        "BUCKEYE_INFERENCE_KEY": key,
        "TOKENIZERS_PARALLELISM": "false",
        **_ray_variables(config),
    }


def _ray_variables(config: RLConfig) -> dict[str, str]:
    """Return the variables that vLLM needs to use the Ray cluster, or {} if a replica is one process."""
    if config.inference is None or config.inference.parallel.pp == 1:
        return {}
    address = config.cluster.ray_address
    chosen = {} if address == "auto" else {"RAY_ADDRESS": address}
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    return {name: os.environ[name] for name in names if name in os.environ} | chosen


def _stop_early(config: RLConfig, processes: Processes, stop: StopFlag, command: Sequence[str]) -> int:
    """Stop the run: the trainer finishes its step and writes a checkpoint, unless Ctrl-C is pressed again."""
    grace = config.stop_seconds
    log.info(
        "Stopping: the trainer finishes its step and writes a checkpoint (Ctrl-C again: stop immediately)"
    )
    _end_trainers(processes, stop, grace)
    processes.stop(processes.children, grace=_FORCED_STOP_SECONDS if stop.requested else TERM_GRACE_SECONDS)
    failed = [child for child in processes.of_kind("trainer") if _failed(child)]
    if failed:
        log.warning("%s ended without a checkpoint", failed[0].role.title)
    checkpoints = checkpoints_oldest_first(config.output_dir / "checkpoints")
    if checkpoints:
        log.info("Stopped; newest checkpoint: step %d. Resume with:", checkpoints[-1].step)
    else:
        log.info("Stopped before the first checkpoint. Restart from step 0 with:")
    log.info("  %s", resume_hint(config, command))
    return EXIT_INTERRUPTED


def _end_trainers(processes: Processes, stop: StopFlag, grace: float) -> None:
    """Request the trainer ranks to stop, and wait until they have ended.

    The wait ends early after `grace` seconds, at the next Ctrl-C, or when a rank fails, because the other
    ranks cannot finish a step without it.
    """
    trainers = processes.of_kind("trainer")
    stop.requested = False
    processes.request_stop(trainers)
    deadline = time.monotonic() + grace
    while any(child.running for child in trainers) and not any(_failed(child) for child in trainers):
        if stop.requested or time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _failed(trainer: Child) -> bool:
    return trainer.returncode not in (None, 0, EXIT_INTERRUPTED)
