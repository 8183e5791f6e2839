"""Start, supervision and end of vLLM's server, which runs as a child process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from buckeye.base import heartbeat
from buckeye.base.process import ChildProcess, StopFlag, cpu_threads
from buckeye.base.request_gate import AccessRules
from buckeye.base.turns import turns
from buckeye.config.inference import InferenceConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.access import client_line, local_url, short_model_name
from buckeye.inference.engine.architecture import read_model_config
from buckeye.inference.vllm.interpreter import SAFE_PATH, VllmInstallation
from buckeye.monitor.log import SUCCESS

log = logging.getLogger(__name__)

_START_SECONDS = 1200.0  # a large model may be compiled first
_STOP_SECONDS = 8.0
_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 30.0
PLUGIN = Path(__file__).with_name("plugin")
_SERVER = "buckeye_vllm_server"
_CPU_CACHE_GB = 1
_CPU_BATCHED_TOKENS = 4096
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_BUCKEYE_KEYS = {
    "model": "inference.model.name",
    "served_model_name": "inference.model.name",
    "host": "inference.server.host",
    "port": "inference.server.port",
    "api_key": "inference.server.api_key_var",
    "dtype": "inference.model.dtype",
    "max_model_len": "inference.model.max_model_len",
    "max_num_seqs": "inference.max_num_seqs",
    "enforce_eager": "inference.model.enforce_eager",
    "trust_remote_code": "inference.model.trust_remote_code",
    "tensor_parallel_size": "inference.parallel.tp",
    "data_parallel_size": "inference.parallel.dp",
    "pipeline_parallel_size": "inference.parallel.pp",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "seed": "inference.seed",
    "kv_cache_memory_bytes": "inference.kv_cache_gb",
    "max_lora_rank": "inference.max_lora_rank",
    "enable_auto_tool_choice": "inference.model.enable_auto_tool_choice",
    "tool_call_parser": "inference.model.tool_call_parser",
    "enable_sleep_mode": "colocate",
}
_FIXED = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "weight_transfer_config": {"backend": "buckeye_fs"},
    "worker_extension_cls": "buckeye_vllm_worker.WorkerExtension",
    "middleware": ["buckeye_vllm_arrays.Arrays", "buckeye_vllm_gate.Gate"],  # the last sees requests first
    "enable_scale_out": True,
    "disable_uvicorn_access_log": True,
}
"""Settings of vLLM that training needs. They provide log-probs of the sampling distribution, routes for token
ids, and weight updates during sampling.
"""
_MULTI_NODE = {"distributed_executor_backend": "ray"}
_REMOVE = "remove it"
_UNSUPPORTED = {
    "hf_token": ("the list of processes would show it", "set HF_TOKEN in the environment instead"),
    "uds": ("Buckeye connects to the server by host and port", _REMOVE),
    "headless": ("Buckeye needs the HTTP server", _REMOVE),
    "logits_processors": ("the trainer would compute other log-probs than vLLM", _REMOVE),
    "root_path": ("Buckeye needs vLLM's default paths", _REMOVE),
    "api_server_count": ("weights are updated through one API server", "set inference.parallel.dp instead"),
    **dict.fromkeys(
        ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"),
        ("Buckeye connects by plain HTTP", "put a proxy with TLS in front of the server"),
    ),
}
"""Keys of `[inference.vllm]` that Buckeye does not support. The values are the reason, and what to do."""


def serve_vllm(
    config: InferenceConfig, vllm: VllmInstallation, directory: Path, *, rules: AccessRules, cpu: bool
) -> None:
    """Serve the model in `directory` until SIGTERM or SIGINT.

    Raise `InferenceError` if vLLM does not start, or ends without a signal to this process. vLLM writes to
    the output of this process.
    """
    command = vllm_command(config, vllm, directory, cpu=cpu)
    environment = vllm_environment(config, rules, python=vllm.python, cpu=cpu, threads=cpu_threads())
    stop = StopFlag().install()
    log.info("Starting %s %s from %s", vllm.distribution, vllm.version, vllm.python)
    child = ChildProcess(command, env=environment)
    try:
        url = local_url(rules.host, config.server.port)
        started = time.monotonic()
        if not _wait_ready(child, url, stop):
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
        log.info("Clients: %s  # model %s", client_line(config, rules), short_model_name(config.model.name))
        heartbeat.report("requests", on="orchestrator")
        heartbeat.ready()
        while not stop.requested:
            _check_running(child)
            time.sleep(_POLL_SECONDS)
    finally:
        # Send SIGTERM, then SIGKILL. The signals go to the whole session, which includes vLLM's engines.
        if not child.end(_STOP_SECONDS, session=True):
            log.warning("vLLM did not end within %.0f s after SIGTERM and was killed", _STOP_SECONDS)
        log.info("Inference server stopped")


def _wait_ready(child: ChildProcess, url: str, stop: StopFlag) -> bool:
    """Wait until GET /health succeeds. Return False if `stop` is requested first."""
    deadline, logged_at = time.monotonic() + _START_SECONDS, time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while not stop.requested:
            heartbeat.report("starts vLLM")
            _check_running(child)
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == 200:
                    return True
            if time.monotonic() > deadline:
                raise InferenceError(
                    f"vLLM was not ready within {_START_SECONDS:g} s",
                    code="BK-INFERENCE-START",
                    at=f"{url}/health",
                    hint="see vLLM's messages in the log lines above",
                )
            if time.monotonic() - logged_at > _PROGRESS_SECONDS:
                logged_at = time.monotonic()
                log.info("Still waiting for vLLM to load the model")
            time.sleep(_POLL_SECONDS)
    return False


def _check_running(child: ChildProcess) -> None:
    code = child.returncode
    if code is not None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "see vLLM's messages in the log lines above"
        raise InferenceError(f"vLLM {how}", code="BK-VLLM", hint=hint)


def vllm_command(config: InferenceConfig, vllm: VllmInstallation, directory: Path, *, cpu: bool) -> list[str]:
    """Return the argv of vLLM's server for the model in `directory`. The argv contains no secret.

    Raise `UsageError` for a key of `[inference.vllm]` that Buckeye sets itself, and for an adapter rank that
    vLLM does not support.
    """
    check_extra(config.vllm)
    model = config.model
    cache_gb = config.kv_cache_gb or (_CPU_CACHE_GB if cpu else None)  # otherwise vLLM takes most of the RAM
    arguments: dict[str, Any] = {
        "model": str(directory),
        "served_model_name": list(dict.fromkeys((model.name, short_model_name(model.name)))),
        "host": config.server.host or "127.0.0.1",
        "port": config.server.port,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": model.max_model_len,
        "seed": config.seed if config.seed is not None else 0,
        "dtype": "float32" if cpu and model.dtype == "auto" else model.dtype,
        "enforce_eager": cpu or model.enforce_eager or None,
        "trust_remote_code": model.trust_remote_code or None,
        "tensor_parallel_size": config.parallel.tp,
        **({"pipeline_parallel_size": config.parallel.pp, **_MULTI_NODE} if config.parallel.pp > 1 else {}),
        "gpu_memory_utilization": None if cpu else config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache_gb is None else int(cache_gb * 1e9),
        **_adapter_arguments(config.max_lora_rank, directory if cpu else None),
        "enable_auto_tool_choice": model.enable_auto_tool_choice or None,
        "tool_call_parser": model.tool_call_parser if model.enable_auto_tool_choice else None,
        **(_single_pass_arguments(config, directory) if cpu else {}),
        "enable_sleep_mode": (turns() is not None and not cpu) or None,  # vLLM on a CPU has no sleep mode
        **_FIXED,
        **config.vllm,
    }
    flags = [flag for name, value in arguments.items() for flag in _flags(name, value)]
    return [str(vllm.python), "-m", _SERVER, *flags]


def _adapter_arguments(rank: int | None, cpu_model: Path | None) -> dict[str, Any]:
    """Return vLLM's settings for LoRA adapters of up to `rank`. vLLM accepts the maxima in `_LORA_RANKS`.

    `cpu_model` is the directory of the model if it is served on a CPU. There, vLLM has no adapters for a
    model with experts: it selects a kernel of Triton, and ends at the first request.
    """
    if rank is None:
        return {}
    config = {} if cpu_model is None else read_model_config(cpu_model / "config.json")
    if any(config.get(key) for key in config if key.endswith("experts")):
        raise UsageError(
            "vLLM does not support adapters of a model with experts on a CPU",
            code="BK-MODEL-UNSUPPORTED",
            at=str(cpu_model),
            hint='set inference.backend = "torch", or train without an adapter',
        )
    supported = next((known for known in _LORA_RANKS if known >= rank), None)
    if supported is None:
        raise UsageError(
            f"inference.max_lora_rank is {rank}, but vLLM supports at most {_LORA_RANKS[-1]}",
            code="BK-CONFIG-VALUE",
            hint="train an adapter of a lower rank",
        )
    return {"enable_lora": True, "max_lora_rank": supported}


def _single_pass_arguments(config: InferenceConfig, directory: Path) -> dict[str, Any]:
    """Return the settings that make vLLM compute each prompt in a single pass on a CPU.

    After a part of a prompt, vLLM resets the random generator of a request with a seed. Generators on a CPU
    do not support this, so vLLM's engine would crash.
    """
    model_config = read_model_config(directory / "config.json") if config.model.max_model_len is None else {}
    longest = config.model.max_model_len or model_config.get("max_position_embeddings", 0)
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(longest, _CPU_BATCHED_TOKENS),
    }


def vllm_environment(
    config: InferenceConfig, rules: AccessRules, *, python: Path, cpu: bool, threads: int
) -> dict[str, str]:
    """Return the environment variables of vLLM's server: those of this process, with changes."""
    environment = dict(os.environ)
    # The key may be that of another server, and the cache size would replace our argument.
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"):
        environment.pop(name, None)
    plugins = [str(PLUGIN), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in plugins if path),
        **SAFE_PATH,
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for pauses and weights, which the gate protects
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if config.parallel.pp > 1:  # makes Ray start vLLM's Python with our plugin on the other nodes
        started = {"py_executable": str(python), "env_vars": {"PYTHONPATH": environment["PYTHONPATH"]}}
        environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": started})
    # A spawned process imports the main module, which makes the process end with its parent. A forked process
    # does not.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment["BUCKEYE_VLLM_PARENT"] = str(os.getpid())
    if config.max_lora_rank is not None:
        # enables the routes for adapters, which the gate protects
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if rules.key is not None:
        environment["VLLM_API_KEY"] = rules.key
    public_rules = asdict(rules)
    del public_rules["key"]
    environment["BUCKEYE_VLLM_RULES"] = json.dumps(public_rules)
    environment["BUCKEYE_VLLM_WEIGHTS_DIR"] = str((config.weights_dir or config.output_dir).absolute())
    if cpu:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
        }
    return environment


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a key of `[inference.vllm]` that Buckeye sets itself or does not support.

    The hint names the setting to use instead.
    """
    for key in extra:
        if key in _FIXED:
            problem, hint = "is set by Buckeye, because training depends on it", _REMOVE
        elif key in _UNSUPPORTED:
            reason, hint = _UNSUPPORTED[key]
            problem = f"is not supported: {reason}"
        elif key in _BUCKEYE_KEYS:
            problem, hint = f"is set by {_BUCKEYE_KEYS[key]}", f"set {_BUCKEYE_KEYS[key]} instead"
        else:
            continue
        raise UsageError(f"inference.vllm.{key} {problem}", code="BK-CONFIG-CONFLICT", hint=hint)


def _flags(name: str, value: object) -> list[str]:
    """Convert a setting to arguments. For example, `max_num_seqs = 8` becomes `--max-num-seqs 8`.

    False becomes `--no-NAME`. A list becomes several values. None becomes no argument.
    """
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [flag, *(json.dumps(item) if isinstance(item, Mapping) else str(item) for item in value)]
    return [flag, str(value)]
