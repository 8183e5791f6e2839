"""Inference process: the engine runs in the main thread, and its HTTP server in another thread.

PyTorch creates a pool of compute threads for each thread that computes. The main thread also builds the
model, so the process needs only one pool.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from buckeye.base import heartbeat
from buckeye.base.http_server import http_server, listen
from buckeye.base.process import cpu_threads, die_with_parent
from buckeye.base.request_gate import AccessRules
from buckeye.base.turns import turns
from buckeye.config.inference import InferenceConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.access import access_rules, client_line
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.architecture import ModelSpec, model_directory
from buckeye.inference.engine.decoder import Decoder
from buckeye.inference.engine.engine import Engine, notify
from buckeye.inference.engine.general_spec import GeneralSpec, read_served_spec, unroundable_reason
from buckeye.inference.engine.kv_cache import KVCache, cache_budget, count_slots, slot_bytes
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights, auto_dtype
from buckeye.inference.render import ChatRenderer
from buckeye.inference.render.template import PROBE_QUESTION
from buckeye.inference.server.app import create_app
from buckeye.inference.server.service import Service
from buckeye.inference.vllm.interpreter import VllmInstallation, find_vllm, require_vllm
from buckeye.inference.vllm.server import serve_vllm
from buckeye.monitor.log import SUCCESS, run_log, setup_logging

log = logging.getLogger(__name__)

_HTTP_START_TIMEOUT = 30.0
_DRAIN_SECONDS = 4.0  # much less than 10 s: the launcher kills a process 10 s after SIGTERM
_DRAIN_POLL_SECONDS = 0.02
_HTTP_STOP_TIMEOUT = 4
_GIL_SWITCH_SECONDS = 0.0002


def run_inference(config: InferenceConfig, *, adapter: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    `adapter` is a directory in peft's format. With an adapter, serve the adapted model. Requests may also use
    the name of the adapter. Raise `UsageError` or `InferenceError` if the server cannot start.
    """
    die_with_parent()
    heartbeat.start()
    log_file = run_log(config.output_dir)
    setup_logging(config.log.level, f"inference {config.server.port}", log_file)
    _on_stop_signal(lambda: sys.exit(0))
    log.info("Starting inference server")
    change = "Choose another port with --server.port, or for `rl` with --inference.server.port."
    # before `access_rules`, which writes a key under the number of the port
    listener = listen(config.server.host or "127.0.0.1", config.server.port, change=change)
    with access_rules(config) as rules:
        _run(config, adapter, rules, listener)


def _run(config: InferenceConfig, adapter: Path | None, rules: AccessRules, listener: socket.socket) -> None:
    directory = model_directory(config.model.name)
    vllm = _select_vllm(config, adapter)
    if vllm is not None:
        listener.close()  # frees the port for vLLM's server
        cpu = _device(config.model.device).type == "cpu"
        serve_vllm(config, vllm, directory, rules=rules, cpu=cpu)
        return
    engine = load_engine(config, directory, adapter)
    service = Service(
        engine,
        model_name=config.model.name,
        directory=directory,
        weights_dir=config.weights_dir or config.output_dir,
        renderer=_load_renderer(directory),
        seed=config.seed,
    )
    service.adapter = str(adapter) if adapter is not None else None
    http = HttpThread(service, listener, rules)
    http.start()
    _on_stop_signal(http.drain)
    host, port = listener.getsockname()[:2]
    log.log(
        SUCCESS,
        "Inference server ready on http://%s:%d (model %s, %d parameters, %s, %d slots)",
        host,
        port,
        service.adapter or config.model.name,
        engine.decoder.weights.num_parameters,
        service.dtype,
        engine.decoder.cache.slots,
    )
    log.info("Clients: %s  # model %s", client_line(config, rules), service.short_model_name)
    heartbeat.ready()
    engine.run()
    if http.failed:
        raise InferenceError("the HTTP server ended unexpectedly", hint="see the log lines above")
    http.stop()
    log.info("Inference server stopped")


def _select_vllm(config: InferenceConfig, adapter: Path | None) -> VllmInstallation | None:
    """Return the installation of vLLM, or None to use the embedded engine.

    With `inference.backend = "auto"`, vLLM is used on a GPU if it is installed. Only the embedded engine can
    start with an adapter.
    """
    if adapter is not None:
        if config.backend == "vllm":
            raise UsageError(
                f'inference.backend = "vllm" cannot serve {adapter}: it is an adapter, not a complete model',
                code="BK-CONFIG-CONFLICT",
                hint="remove inference.backend, or export a complete model with --merge-lora",
            )
        return None
    if config.backend == "vllm":
        return require_vllm(config.vllm_python)
    if config.backend == "torch" or config.model.quantization or _device(config.model.device).type == "cpu":
        return None
    installation = find_vllm(config.vllm_python)
    if installation is None:
        log.warning("vLLM is not installed (`buckeye vllm install`): the GPU runs the embedded engine")
    return installation


def load_engine(config: InferenceConfig, directory: Path, adapter: Path | None = None) -> Engine:
    """Return an engine for the model in `directory`, with the settings of `config`.

    `adapter` is the directory of a LoRA adapter to apply, or None.
    """
    device = _device(config.model.device)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    # cuDNN's attention prepares every new shape, and decoding has thousands of shapes
    torch.backends.cuda.enable_cudnn_sdp(False)
    spec = read_served_spec(directory)
    if config.model.quantization is not None and (reason := unroundable_reason(directory, spec)) is not None:
        raise InferenceError(
            f"model.quantization does not fit {directory}: {reason}",
            code="BK-MODEL-UNSUPPORTED",
            at="inference.model.quantization",
            hint="leave it out",
        )
    max_len = min(config.model.max_model_len or spec.max_positions, spec.max_positions)
    if config.model.max_model_len and max_len < config.model.max_model_len:
        log.warning("inference.model.max_model_len is reduced to %d, the maximum of the model", max_len)
    checkpoint = Checkpoint(directory) if adapter is None else AdaptedCheckpoint(directory, adapter)
    name = config.model.dtype
    dtype = auto_dtype(checkpoint, device) if name == "auto" else getattr(torch, name)
    if isinstance(spec, GeneralSpec):
        return _load_general_engine(config, spec, checkpoint, max_len=max_len, dtype=dtype, device=device)
    quantization = config.model.quantization
    weights = DecoderWeights(spec, dtype=dtype, device=device, quantization=quantization)
    weights.check(checkpoint)
    weights.load(checkpoint)
    slots, running = _count_slots(config, spec, slot_bytes(spec, max_len, dtype), max_len, device)
    cache = KVCache(
        spec,
        slots=running,
        spare=slots - running,
        max_len=max_len,
        dtype=dtype,
        device=device,
        allocate=turns() is None,  # otherwise the trainer may use the device now
    )
    return Engine(Decoder(spec, weights, cache))


def _load_general_engine(
    config: InferenceConfig,
    spec: GeneralSpec,
    checkpoint: Checkpoint,
    *,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Engine:
    from buckeye.inference.engine.general_decoder import (  # the import of transformers takes seconds
        SPARE_COLUMNS,
        ColumnCache,
        TransformersDecoder,
        load_general_weights,
    )

    weights, token_bytes = load_general_weights(spec, checkpoint, dtype=dtype, device=device)
    size = token_bytes * (max_len + SPARE_COLUMNS)
    slots, running = _count_slots(config, spec, size, max_len, device)
    cache = ColumnCache(
        slots=running,
        spare=slots - running,
        max_len=max_len,
        dtype=dtype,
        device=device,
        allocate=turns() is None,
    )
    return Engine(TransformersDecoder(spec, weights, cache))


def _count_slots(
    config: InferenceConfig, spec: ModelSpec | GeneralSpec, size: int, max_len: int, device: torch.device
) -> tuple[int, int]:
    """Return the number of slots of `size` bytes, and how many of them hold running sequences."""
    if config.kv_cache_gb is not None:
        budget = int(config.kv_cache_gb * 1e9)
    else:
        logits = 4 * config.max_num_seqs * spec.vocab_size
        budget = cache_budget(device, gpu_share=config.gpu_memory_utilization, logits=logits)
    slots = count_slots(
        size,
        max_num_seqs=2 * config.max_num_seqs,  # the second half are spare slots, which keep earlier turns
        max_len=max_len,
        budget=budget,
    )
    return slots, min(slots, config.max_num_seqs)


class HttpThread:
    """Thread that runs the HTTP server, and notifies its handlers of the engine's updates.

    When the thread ends, it stops the engine.
    """

    def __init__(self, service: Service, listener: socket.socket, rules: AccessRules) -> None:
        app = create_app(service, rules)
        self._server = http_server(app, timeout_graceful_shutdown=_HTTP_STOP_TIMEOUT)
        self._listener = listener
        self.failed = False
        """True if the HTTP server ended without a call of `stop`."""
        self._service = service
        self._engine = service.engine
        self._engine.deliver = self._deliver
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> None:
        """Start the thread. Return when the HTTP server accepts requests."""
        # The engine waits at most this long for another thread to release the interpreter lock.
        sys.setswitchinterval(_GIL_SWITCH_SECONDS)
        self._thread.start()
        deadline = time.monotonic() + _HTTP_START_TIMEOUT
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise InferenceError(
                    f"the HTTP server did not start within {_HTTP_START_TIMEOUT:g} s",
                    code="BK-INFERENCE-START",
                    hint="see the log lines above",
                )
            time.sleep(0.005)

    def drain(self) -> None:
        """Refuse new requests, wait a few seconds for open requests to finish, then stop the engine.

        A second call stops the engine at once. Safe in a signal handler.
        """
        if self._service.draining:
            self._engine.stop()
            return
        self._service.draining = True
        self._drained = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        service, deadline = self._service, time.monotonic() + _DRAIN_SECONDS
        if service.requests:
            log.info(
                "Stopping: waiting up to %g s for %d open requests", _DRAIN_SECONDS, len(service.requests)
            )
        # requests cannot finish while the engine is paused
        while service.requests and not self._engine.is_paused and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if service.requests:
            log.warning("Stopping: aborting %d unfinished requests", len(service.requests))
        self._engine.stop()

    def stop(self) -> None:
        """Stop the HTTP server when its open requests are finished, or after a few seconds."""
        self._server.should_exit = True
        self._thread.join(_HTTP_STOP_TIMEOUT + 2)

    def _deliver(self, sequences: list[Sequence]) -> None:
        # the engine's thread calls this
        try:
            self._loop.call_soon_threadsafe(notify, sequences)
        except RuntimeError:  # the loop is closed, and no client is connected
            log.debug("Updates of %d sequences arrived after the HTTP server stopped", len(sequences))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        finally:
            self.failed = not self._server.should_exit
            self._engine.stop()


def _on_stop_signal(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop())


def _load_renderer(directory: Path) -> ChatRenderer | None:
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        log.warning("%s has no tokenizer: requests and replies can only contain token ids", directory)
        return None
    renderer = ChatRenderer(directory)
    if renderer.tokenizer.chat_template and (problem := renderer.template.find_problem([PROBE_QUESTION])):
        log.warning("Chats are refused, only completions work: %s", problem)
    return renderer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise InferenceError(
            'inference.model.device is "cuda", but PyTorch finds no GPU',
            code="BK-DEVICE",
            hint='set inference.model.device to "cpu" or "auto"',
        )
    return torch.device(name)
