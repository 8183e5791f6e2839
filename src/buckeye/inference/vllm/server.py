"""Starts vLLM's server and stays with it: ready, watched, ended with this process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from buckeye.base import heartbeat
from buckeye.base.process import StopFlag, cpu_threads
from buckeye.base.request_gate import Rules
from buckeye.config.inference import InferenceConfig
from buckeye.errors import InferenceError
from buckeye.inference.vllm.command import server_command, server_environment
from buckeye.inference.vllm.interpreter import Vllm
from buckeye.monitor.log import SUCCESS

log = logging.getLogger(__name__)

_START_SECONDS = 1200.0  # a large model may first be compiled
_STOP_SECONDS = 8.0
_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 30.0


def serve_vllm(config: InferenceConfig, vllm: Vllm, directory: Path, *, rules: Rules, cpu: bool) -> None:
    """Serve the model in `directory` until SIGTERM or SIGINT.

    Raises InferenceError if vLLM does not start or ends by itself; its own output is on this process's.
    """
    command = server_command(config, vllm, directory, cpu=cpu)
    environment = server_environment(config, rules, cpu=cpu, threads=cpu_threads())
    stop = StopFlag().install()
    log.info("Starting %s %s from %s", vllm.distribution, vllm.version, vllm.python)
    child = _start(command, environment)
    try:
        url = f"http://{_reachable(config.server.host)}:{config.server.port}"
        started = time.monotonic()
        if not _until_ready(child, url, stop):
            return
        seconds = time.monotonic() - started
        log.log(
            SUCCESS,
            "Inference server ready on %s (model %s, %s %s, after %.0f s)",
            url,
            config.model.name,
            vllm.distribution,
            vllm.version,
            seconds,
        )
        heartbeat.report("requests", on="orchestrator")
        heartbeat.ready()
        while not stop.requested:
            _check(child)
            time.sleep(_POLL_SECONDS)
    finally:
        _end(child)
        log.info("Inference server stopped")


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  a list of words, without a shell
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _until_ready(child: subprocess.Popen[bytes], url: str, stop: StopFlag) -> bool:
    """Wait for /health; False if a stop was asked for first."""
    deadline, told = time.monotonic() + _START_SECONDS, time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while not stop.requested:
            heartbeat.report("starts vLLM")
            _check(child)
            if _healthy(client, url):
                return True
            if time.monotonic() > deadline:
                raise InferenceError(f"vLLM did not answer {url}/health within {_START_SECONDS:g} s.")
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                log.info("Still waiting for vLLM to load the model")
            time.sleep(_POLL_SECONDS)
    return False


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _check(child: subprocess.Popen[bytes]) -> None:
    code = child.poll()
    if code is not None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise InferenceError(f"vLLM {how}; its messages are in the lines above.")


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to what is left of vLLM's session: its engine processes are in it."""
    _signal(child, signal.SIGTERM)
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("vLLM did not end within %.0f s of SIGTERM: killed", _STOP_SECONDS)
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return


def _reachable(host: str | None) -> str:
    """An address at which a server on `host` answers this machine."""
    if host is None or host in ("0.0.0.0", "::", "localhost"):  # noqa: S104  a comparison
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
