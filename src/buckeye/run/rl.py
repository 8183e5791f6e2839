"""`rl`: start inference, orchestrator and trainer, watch them, show progress, end them all in good order."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from buckeye.checkpoint import list_checkpoints, resolve_checkpoint
from buckeye.config.dump import to_json
from buckeye.config.rl import RLConfig
from buckeye.config.shared import WandbConfig
from buckeye.errors import RunError
from buckeye.monitor.log import SUCCESS, run_log, setup_logging
from buckeye.monitor.tracker import check_wandb, tracked
from buckeye.process import INTERRUPTED, RunIdentity, StopFlag
from buckeye.run.changes import RECORDED_CONFIG, as_recorded, changed_settings
from buckeye.run.directory import begin_attempt, clean, locked, refuse_used
from buckeye.run.disk import human_bytes
from buckeye.run.machine import free_disk_bytes, this_machine
from buckeye.run.model_files import fetch_model
from buckeye.run.plan import Role, RolePlan, make_plan
from buckeye.run.processes import Processes
from buckeye.run.progress import Progress, human_duration
from buckeye.run.recorder import Recorder
from buckeye.run.registry import register
from buckeye.run.restarts import Restarts
from buckeye.storage import write_file

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LAST_CHECKPOINT_SECONDS = 120.0


def run_rl(config: RLConfig, command: Sequence[str]) -> int:
    """Run to the end and return the exit code. `command` is what the user typed, for messages that repeat it.

    Raises UsageError before anything was started, RunError if a process failed.
    """
    output_dir = config.output_dir
    wandb = wandb_settings(config)
    check_wandb(wandb)
    with locked(output_dir):
        resume_step = find_resume_step(config)
        if resume_step is None and not config.clean:
            refuse_used(output_dir, resume_command=resume_command(command))
        model_path = fetch_model(config.trainer.model.name)
        plan = make_plan(config, this_machine(), model_path=model_path)
        if resume_step is None and config.clean:
            clean(output_dir, needed=[model_path])
        identity = begin_attempt(output_dir, resumed_step=resume_step)
        setup_logging(config.log.level, "rl", run_log(output_dir) if config.log.file else None)
        _warn_about_disk(plan, output_dir)
        if resume_step is not None:
            _tell_changes(config)
        write_role_configs(config, plan, model_path=model_path, resume_step=resume_step)
        recorder = Recorder(config, identity, arguments_of(command), resume_step)
        register(output_dir, identity.run_id)
        with tracked(wandb, output_dir=output_dir, run_id=identity.run_id, config=config):
            return _run_recorded(config, plan, identity, command, recorder)


def wandb_settings(config: RLConfig) -> WandbConfig | None:
    """Where the run is logged in Weights & Biases; None if it is not. A process's section counts for all."""
    return config.wandb or config.trainer.wandb


def find_resume_step(config: RLConfig) -> int | None:
    """The step of the checkpoint to resume from; None to start from the model."""
    ckpt = config.trainer.ckpt
    if ckpt is None or ckpt.resume_step is None:
        return None
    return resolve_checkpoint(config.output_dir / "checkpoints", ckpt.resume_step).step


def resume_command(command: Sequence[str]) -> str:
    """The command that continues the run which `command` started, from its newest checkpoint."""
    return shlex.join(to_resume(command))


def to_resume(words: Sequence[str]) -> list[str]:
    """The words of a command, or of its flags, changed so that they continue the run."""
    kept: list[str] = []
    skip_value = False
    for word in words:
        resume_step = word.replace("_", "-").partition("=")[0].endswith("ckpt.resume-step")
        if not (skip_value or resume_step or word in ("--clean", "--resume", "--dry-run")):
            kept.append(word)
        skip_value = resume_step and "=" not in word
    return [*kept, "--resume"]


def arguments_of(command: Sequence[str]) -> list[str]:
    """The words after `rl`, or after `buckeye rl`."""
    return list(command[2:] if command[0] == "buckeye" else command[1:])


def write_role_configs(
    config: RLConfig, plan: RolePlan, *, model_path: Path, resume_step: int | None
) -> None:
    """Write the resolved configuration of every process to `configs/`, and the whole one to
    `configs/rl.json`."""
    directory = config.output_dir / "configs"
    directory.mkdir(parents=True, exist_ok=True)
    write_file(config.output_dir / RECORDED_CONFIG, to_json(as_recorded(config)))
    for role in plan.roles:
        write_file(directory / role.config_name, _role_config(config, role, plan, model_path, resume_step))


def _role_config(
    config: RLConfig, role: Role, plan: RolePlan, model_path: Path, resume_step: int | None
) -> str:
    output_dir = config.output_dir.absolute()
    section = getattr(config, role.kind)
    model = section.model.model_copy(update={"name": str(model_path)})
    changes: dict[str, object] = {"output_dir": output_dir, "model": model}
    if role.kind == "inference":
        changes["server"] = section.server.model_copy(update={"port": role.port})
    elif section.ckpt is not None:  # one resolver: both processes are told the same step
        changes["ckpt"] = section.ckpt.model_copy(update={"resume_step": resume_step})
    if role.kind == "orchestrator" and plan.base_urls:
        changes["client"] = section.client.model_copy(
            update={"base_url": plan.base_urls, "api_key_var": "BUCKEYE_INFERENCE_KEY"}
        )
    return to_json(section.model_copy(update=changes))


def _tell_changes(config: RLConfig) -> None:
    for line in changed_settings(config.output_dir, config):
        log.warning("Changed since the run was last started: %s", line)


def _warn_about_disk(plan: RolePlan, output_dir: Path) -> None:
    free = free_disk_bytes(output_dir)
    if plan.disk.total is not None and plan.disk.total > free:
        log.warning(
            "The run may need %s of disk and %s is free on the file system of %s",
            human_bytes(plan.disk.total),
            human_bytes(free),
            output_dir,
        )


def _run_recorded(
    config: RLConfig, plan: RolePlan, identity: RunIdentity, command: Sequence[str], recorder: Recorder
) -> int:
    try:
        code = _run(config, plan, identity, command, recorder)
    except BaseException as error:
        recorder.ended("failed", str(error) or type(error).__name__)
        raise
    recorder.ended("stopped" if code == INTERRUPTED else "finished")
    return code


def _run(
    config: RLConfig, plan: RolePlan, identity: RunIdentity, command: Sequence[str], recorder: Recorder
) -> int:
    stop = StopFlag().install()
    started = time.monotonic()
    log.info("Starting RL run %s (attempt %d) in %s", identity.run_id, identity.attempt, config.output_dir)
    processes = Processes(config.output_dir, _run_environment(identity))
    progress = Progress(config.output_dir / "metrics.jsonl", max_steps=config.trainer.max_steps)
    restarts = Restarts(processes, config.output_dir, note=recorder.restarting)
    try:
        start_all(processes, plan)
        while not stop.requested:
            processes.check("orchestrator", "trainer")
            restarts.tend()
            recorder.observe(processes)
            if processes.finished():
                progress.update("")
                break
            progress.update("starting: waiting for the first step (logs/ has the details)")
            time.sleep(_POLL_SECONDS)
        progress.clear()
        if stop.requested:
            recorder.stopping()
            return _stop_early(config, processes, stop, command)
    except RunError:
        progress.clear()
        log.warning("Terminating all processes...")
        processes.stop(processes.of_kind("trainer"), grace=_LAST_CHECKPOINT_SECONDS)
        raise
    finally:
        processes.stop_all()
    log.log(SUCCESS, "RL training finished!")
    log.info("%s | %s", human_duration(time.monotonic() - started), _what_is_there(config))
    return 0


def _what_is_there(config: RLConfig) -> str:
    weights = final_weights(config)
    if config.trainer.model.experimental.lora is None:
        return f"model: {weights} | talk to it: buckeye chat {weights}"
    return f"adapter: {weights} | a model of it: buckeye export {config.output_dir} --merge-lora"


def start_all(processes: Processes, plan: RolePlan) -> None:
    """Start every process of a plan, with the era's log lines."""
    where = "GPU(s)" if plan.on_gpu else "CPU slot(s)"
    for kind in ("inference", "orchestrator", "trainer"):
        roles = plan.of_kind(kind)
        devices = " ".join(str(device) for role in roles for device in role.devices)
        if roles:
            log.info("Starting %s process%s", kind, f" on {where} {devices}" if devices else "")
        for role in roles:
            processes.start(role)


def _run_environment(identity: RunIdentity) -> dict[str, str]:
    key = os.environ.get("BUCKEYE_INFERENCE_KEY") or secrets.token_urlsafe(24)
    return {
        "BUCKEYE_RUN_ID": identity.run_id,
        "BUCKEYE_ATTEMPT": str(identity.attempt),
        "BUCKEYE_INFERENCE_KEY": key,
        "TOKENIZERS_PARALLELISM": "false",
    }


def _stop_early(config: RLConfig, processes: Processes, stop: StopFlag, command: Sequence[str]) -> int:
    """Let the trainer finish its step and checkpoint; a second Ctrl-C ends it at once."""
    grace = config.trainer.dist_timeout_seconds
    log.info("Stopping: the trainer finishes its step and checkpoints (Ctrl-C again to end at once)")
    trainers = processes.of_kind("trainer")
    stop.requested = False
    processes.request_stop(trainers)
    deadline = time.monotonic() + grace
    while any(child.running for child in trainers) and not stop.requested and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    processes.stop_all()
    failed = [child for child in trainers if child.returncode not in (0, INTERRUPTED)]
    if failed:
        log.warning("%s did not checkpoint on the way out", failed[0].role.title)
    checkpoints = list_checkpoints(config.output_dir / "checkpoints")
    if checkpoints:
        newest = max(checkpoints, key=lambda info: (info.attempt, info.step))
        log.info("Stopped; the newest checkpoint is of step %d. Continue with:", newest.step)
        log.info("  %s", resume_command(command))
    else:
        log.info("Stopped before there was a checkpoint; start again with --clean")
    return INTERRUPTED


def final_weights(config: RLConfig) -> Path:
    """The directory of the newest published weights."""
    steps = [p for p in (config.output_dir / "weights").glob("step_*") if p.name[5:].isdigit()]
    return max(steps, key=lambda p: int(p.name[5:]), default=config.output_dir / "weights")
