"""`buckeye rl --provider ...`: train on another machine, and download the files of the run."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from buckeye.base.columns import counted
from buckeye.base.disk import human_bytes
from buckeye.base.distribution import need
from buckeye.base.prime_account import prime_account
from buckeye.base.process import EXIT_INTERRUPTED
from buckeye.base.storage import read_json, write_file
from buckeye.config.cluster import ClusterConfig
from buckeye.config.load import to_json
from buckeye.errors import BuckeyeError, PodGoneError, RemoteError, UsageError
from buckeye.inference.vllm.interpreter import PYTHON_VARIABLE
from buckeye.launch.changed_settings import RECORDED_CONFIG, record_config
from buckeye.launch.resume import find_resume_checkpoint
from buckeye.mcp.tasks.trust import TRUSTED_VARIABLE, trusted_digests
from buckeye.monitor.console import protect_output
from buckeye.monitor.trackio_tensorboard import TrackioTracker
from buckeye.remote import job as jobs
from buckeye.remote.base import RemoteRequest
from buckeye.remote.bootstrap import Software, bootstrap
from buckeye.remote.connection import SshConnection, check_identity_file
from buckeye.remote.control import RemoteRunRecorder, stop_left_job
from buckeye.remote.follow import REMOTE_LOG, Follower
from buckeye.remote.project import Project, read_project
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.rental import Machine, dead_man_minutes, host_target, own_host, rent_pod
from buckeye.remote.start_check import check_start
from buckeye.remote.teardown import restored_handlers
from buckeye.remote.upload import send_project
from buckeye.run_files.directory import (
    RUN_FILE,
    check_unused,
    is_unstarted,
    lock_directory,
    move_unstarted_run,
)
from buckeye.run_files.known_runs import RemoteJob, register_run
from buckeye.workers.installed.record import ENVIRONMENTS_VARIABLE

POD_KEY_VARIABLE = "BUCKEYE_POD_KEY"

_CONNECT_SECONDS = 600.0  # timeout for a rented machine, which may still boot
_HOST_CONNECT_SECONDS = 30.0  # timeout for a host of the user
_CHECK_SECONDS = 30.0
_LAST_SECONDS = 20.0
# The run stops at most 600 s or 10 % of its time before `max_hours`, to write and download a checkpoint.
_MARGIN_SECONDS, _MARGIN_SHARE = 600.0, 0.1
_STOPPED = (0, 128 + signal.SIGTERM)  # a run that is stopped before it handles signals has the second code

Tell = Callable[[str], None]


def run_remote(
    config_path: Path,
    request: RemoteRequest,
    *,
    resume: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Train on a rented machine or on a host of the user, and return the exit code of the run.

    `config_path` is the configuration file. With `resume`, the run resumes from the newest local checkpoint.
    `on_start` is called after the checks of this machine.
    A rented machine is ended in every case, unless `request.keep` is set. Raises UsageError before an order,
    and RemoteError for later failures.
    """
    check_installed()
    protect_output()  # a run, and a rental, do not end because a reader such as `head` has ended
    if request.identity_file is not None:
        check_identity_file(Path(os.path.expanduser(request.identity_file)))
    is_rental = request.provider == "prime"
    if is_rental:
        prime_account()  # raises without a key
    else:
        host_target(request.host)
    project = read_project(config_path, resume=resume)
    if resume and stop_left_job(project.output_dir, tell=_tell):
        project = read_project(config_path, resume=True)  # with the downloaded checkpoint
    check_single_node(project.config.cluster, hosts=len(request.host) or 1)
    minutes = dead_man_minutes()
    with lock_directory(project.output_dir):
        if not resume:
            check_unused(project.output_dir, resume_command=f"buckeye rl @ {config_path} --resume ...")
        _tell_project(project)
        check_start(project, request, is_rental=is_rental, tell=_tell)
        if not resume:
            move_unstarted_run(project.output_dir, also=[project.output_dir / REMOTE_LOG])
        run_id, job_id = _ids(project, resume=resume)
        recorder = RemoteRunRecorder(project.output_dir, run_id, _tell)
        register_run(project.output_dir, run_id)
        on_start()
        to_continue = partial(_command_to_continue, project, config_path, request, resume=resume)
        with (
            _record_end(recorder, to_continue),
            _machine(request, project, job_id, recorder.tell) as pod,
            restored_handlers(
                signal.SIGINT, signal.SIGTERM, signal.SIGHUP
            ),  # asyncio replaces these handlers
        ):
            check_single_node(project.config.cluster, hosts=len(pod.ssh))
            dead_man = None if request.keep else pod.dead_man_timer(minutes)
            try:
                code = asyncio.run(_RemoteRun(pod, project, job_id, dead_man, recorder).carry_out())
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
        if code:
            _tell(to_continue())
        return code


@contextmanager
def _machine(request: RemoteRequest, project: Project, run_id: str, tell: Tell) -> Iterator[Machine]:
    """Yield the host of the user, or rent a pod and end it after the block."""
    if request.provider == "ssh":
        yield own_host(request, run_id=run_id)
        return
    with (
        PrimeProvider(prime_account()) as provider,
        rent_pod(provider, request, run_id=run_id, disk_gb=project.disk_gb, tell=tell) as pod,
    ):
        yield pod


class _RemoteRun:
    """A start of `rl` on another machine, from the first connection to the last download."""

    def __init__(
        self,
        pod: Machine,
        project: Project,
        run_id: str,
        dead_man: dict[str, Any] | None,
        recorder: RemoteRunRecorder,
    ) -> None:
        self._notes, self._leaving = recorder, False
        self._pod, self._project, self._run_id = pod, project, run_id
        self._dead_man, self._rents = dead_man, pod.provider is not None
        self._follower: Follower | None = None
        self._work: asyncio.Task[int] | None = None
        self._link = SshConnection(
            pod.ssh[0],
            known_hosts=pod.known_hosts,
            identity_file=Path(os.path.expanduser(pod.identity_file)) if pod.identity_file else None,
            own_settings=not self._rents,
            tell=self._notes.tell,
        )

    async def carry_out(self) -> int:
        """Run the job on the machine, download its files, and return its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        self._work = asyncio.create_task(self._run_job())
        watching = asyncio.create_task(self._watch_pod())
        try:
            await asyncio.wait({self._work, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not self._work.done():
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)
                watching.result()
            return await self._work
        finally:
            watching.cancel()
            self._link.close()

    def _interrupt(self) -> None:
        """Handle Ctrl-C and other signals.

        The first signal requests a checkpoint and the end of the job. The next signal ends the run. Before
        the job has started, the first signal ends the run. Later signals have no effect.
        """
        if self._follower is not None and not self._follower.stop.is_set():
            self._notes.tell(
                "Stopping: the remote trainer writes a checkpoint and ends (Ctrl-C again: end immediately)"
            )
            self._notes.update(stopping=True)
            self._follower.stop.set()
        elif self._leaving:
            self._notes.tell("The run is already ending.")
        elif self._work is not None:
            self._leaving = True
            self._work.cancel()

    async def _watch_pod(self) -> None:
        """Check the machine repeatedly. Raises PodGoneError when the provider has ended it.

        Shortly before `max_hours` have passed, stop the run.
        """
        told = ""
        while True:
            self._stop_in_time()
            try:
                await asyncio.to_thread(self._pod.check)
            except PodGoneError:
                raise
            except RemoteError as error:
                if self._pod.expires is not None and time.time() >= self._pod.expires:
                    raise
                if str(error) != told:  # only a warning: the machine may run while the API does not respond
                    self._notes.tell(f"warning: {error}")
                told = str(error)
            await asyncio.sleep(_CHECK_SECONDS)

    def _stop_in_time(self) -> None:
        expires, follower = self._pod.expires, self._follower
        if expires is None or follower is None or follower.stop.is_set():
            return
        margin = min(_MARGIN_SECONDS, _MARGIN_SHARE * (expires - self._pod.started))
        if expires - time.time() < margin:
            self._notes.tell("--max-hours has nearly passed: the run writes a checkpoint and stops.")
            follower.stop.set()

    async def _run_job(self) -> int:
        job: RemoteJob | None = None
        try:
            self._notes.tell(f"Connecting to {self._link.target} ...")
            seconds = _CONNECT_SECONDS if self._rents else _HOST_CONNECT_SECONDS
            await self._link.connect(timeout=seconds)
            software = await bootstrap(
                self._link,
                tell=self._notes.tell,
                environments=self._project.environments,
                extras=self._project.extras,
            )
            if self._project.config.trainer.model.attn != "sdpa":
                self._notes.tell(f"Attention: {software.attention}")
            job = self._job(await jobs.remote_home(self._link), software.python)
            self._notes.tell(f"Sending the project to {self._link.target} ...")
            sent = await send_project(
                self._link,
                job.python,
                jobs.project_folder(job),
                self._project.manifest,
                tell=self._notes.tell,
            )
            files = counted(len(self._project.manifest.files), "file")
            self._notes.tell(f"Sent {files}, {human_bytes(sent)}")
            await jobs.prepare(self._link, job, self._settings(job, software))
            await jobs.start(self._link, job, self._secrets())
            self._remember(job)
            self._notes.tell(f"The run has started on {self._link.target}.")
            return await self._follow(job)
        except (Exception, asyncio.CancelledError):
            if job is not None:
                await self._leave(job)
            raise

    def _settings(self, job: RemoteJob, software: Software) -> dict[str, Any]:
        found = {ENVIRONMENTS_VARIABLE: software.environments, PYTHON_VARIABLE: software.vllm}
        project = jobs.project_folder(job)
        installed = {name: place for name, place in found.items() if place is not None}
        return {
            "argv": [job.python, "-m", "buckeye", "rl", *self._project.arguments],
            "cwd": project,
            "output_dir": self._project.remote_output_dir,
            "env": {
                "BUCKEYE_NEW_RUN_ID": self._run_id,
                TRUSTED_VARIABLE: ",".join(sorted(trusted_digests())),
                # by default, trackio writes to the home directory, which is not downloaded
                "TRACKIO_DIR": f"{project}/{self._project.remote_output_dir}/{TrackioTracker.folder}",
                **installed,
            },
            "dead_man": self._dead_man,
        }

    def _secrets(self) -> dict[str, str]:
        found = dict(self._project.secrets)
        if found:
            self._notes.tell(f"Keys sent to the machine: {', '.join(sorted(found))}")
        key = os.environ.get(POD_KEY_VARIABLE)
        return {**found, POD_KEY_VARIABLE: key} if key and self._rents else found

    async def _follow(self, job: RemoteJob) -> int:
        output = self._project.output_dir
        (output / REMOTE_LOG).unlink(missing_ok=True)  # the log of an earlier job
        self._follower = Follower(self._link, job, output, screen=sys.stdout, tell=self._notes.tell)
        code = await self._follower.until_end()
        await jobs.forget_secrets(self._link, job)
        self._notes.tell(f"The remote run has ended with code {code}. Its files are in {output}")
        return EXIT_INTERRUPTED if self._follower.stop.is_set() and code in _STOPPED else code

    def _sent(self) -> set[str]:
        """Return the sent files of the run directory that the remote run does not change."""
        prefix = f"{self._project.remote_output_dir}/"
        names = [name for name in self._project.manifest.files if name.startswith(prefix)]
        return {name.removeprefix(prefix) for name in names} - _records(self._project.output_dir)

    def _remember(self, job: RemoteJob) -> None:
        """Record the configuration, the machine and the job of the run, for other commands.

        Other commands trust only records that this machine writes, not records of the remote machine.
        """
        config = self._project.config
        record_config(config)
        trainer = config.output_dir / RECORDED_CONFIG.with_name("trainer.json")
        write_file(trainer, to_json(config.trainer), mode=0o600)  # for `rl replay`
        self._notes.update(
            state="running",
            arguments=self._project.arguments,
            working_directory=str(self._project.root),
            job=job,
        )

    def _job(self, home: str, python: str) -> RemoteJob:
        identity_file = self._pod.identity_file
        return RemoteJob(
            id=self._run_id,
            pod=self._pod.name if self._rents else None,
            target=str(self._link.target),
            folder=f"{home}/.buckeye/jobs/{self._run_id}",
            python=python,
            identity_file=str(identity_file.absolute()) if identity_file is not None else None,
            known_hosts=str(self._pod.known_hosts.absolute()),
            sent=tuple(sorted(self._sent())),
        )

    async def _leave(self, job: RemoteJob) -> None:
        """Stop the job and delete its keys, because the machine may continue to run."""
        self._notes.tell(f"Ending: stopping the remote job, at most {_LAST_SECONDS:.0f} s")
        with suppress(BuckeyeError, OSError, TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                async with jobs.open_agent(self._link, job) as asked:
                    await asked.request("stop")
                await jobs.forget_secrets(self._link, job)


def _records(output: Path) -> set[str]:
    """Return the files of a resumed run that the remote run may change, so they are downloaded again."""
    if not (output / RUN_FILE).exists():
        return set()
    return {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()} - {
        "run.toml"
    }


def _ids(project: Project, *, resume: bool) -> tuple[str, str]:
    """Return the id of the run and the id of its job. Each resume gets a new job."""
    if not resume:
        fresh = secrets.token_hex(4)
        return fresh, fresh
    run_id = str(read_json(project.output_dir / RUN_FILE)["run_id"])
    return run_id, f"{run_id}-{secrets.token_hex(2)}"


@contextmanager
def _record_end(recorder: RemoteRunRecorder, command_to_continue: Callable[[], str]) -> Iterator[None]:
    """Record the end of the run. After an error, also report the command to resume it.

    This is the outermost context, because the end of a machine may fail, too.
    """
    try:
        yield
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        words = "interrupted" if is_interrupt else str(error) or type(error).__name__
        recorder.update(state="over", doing=words.splitlines()[0])
        if is_interrupt:
            _tell(command_to_continue())
        elif isinstance(error, RemoteError):
            command = command_to_continue()
            error.hint = f"{error.hint}\n{command}" if error.hint else command
        raise
    recorder.update(state="over")


def check_single_node(cluster: ClusterConfig, *, hosts: int) -> None:
    """Raise UsageError for a run on several nodes."""
    if max(hosts, cluster.nodes) > 1:
        raise UsageError(
            f"--provider trains on one machine, and this run has {max(hosts, cluster.nodes)}",
            code="BK-CONFIG-CONFLICT",
            hint="name one --host and set cluster.nodes = 1, or set cluster.engine on a cluster",
        )


def check_installed() -> None:
    """Raise UsageError if packages that only remote training needs are not installed."""
    for module in ("asyncssh", "pathspec"):
        need(module, "Training on another machine")


def _command_to_continue(project: Project, config_path: Path, request: RemoteRequest, *, resume: bool) -> str:
    """Return a message with the command to resume the run from the newest local checkpoint."""
    output = project.output_dir
    has_begun = (output / RUN_FILE).is_file() and (resume or not is_unstarted(output))
    checkpoint = find_resume_checkpoint(output) if has_begun else None
    again = ["--resume"] if has_begun else []
    command = shlex.join(["buckeye", "rl", "@", str(config_path), *again, *request.flags()])
    if checkpoint is not None:
        return f"The checkpoint of step {checkpoint.step} is downloaded. Resume from it: {command}"
    return f"No checkpoint is downloaded. Start the run again: {command}"


def _tell_project(project: Project) -> None:
    manifest = project.manifest
    _tell(f"To send: {counted(len(manifest.files), 'file')}, {human_bytes(manifest.size)}, of {project.root}")
    if manifest.outside:
        _tell(
            f"warning: {counted(len(manifest.outside), 'link')} to files outside of the project not sent: "
            f"{', '.join(manifest.outside[:5])}"
        )
    if project.config.trainer.ckpt is None:
        _tell("warning: the run writes no checkpoints (trainer.ckpt): if the machine fails, the run is lost.")


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
