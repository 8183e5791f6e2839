"""Extension of vLLM's workers that loads or receives weights, and reports the state of a worker.

The import of this module registers the weight transfer backend `buckeye_fs`. Buckeye passes the extension to
vLLM as `--worker-extension-cls buckeye_vllm_worker.WorkerExtension`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import buckeye_vllm_imports
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest

_BACKEND = "buckeye_fs"
_MANIFEST = "manifest.json"
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_UNTRAINED = re.compile(r"(^|\.)(mtp\w*|visual|vision_\w+|audio_\w+|multi_modal_projector)\.")
_foreign_files = buckeye_vllm_imports.load("foreign_files")
_broadcast_group = buckeye_vllm_imports.load("broadcast_group", room="transport")
_weights_digest = buckeye_vllm_imports.load("weights_digest", room="transport")
_PROCESS = secrets.token_hex(8)
"""Unique id of this process. A pid is not unique, because a later process may get the same number."""

if hasattr(torch.cpu, "_init_amx"):
    # vLLM's CPU attention uses AMX tiles, but does not request them from the kernel. Without this call, the
    # process would end with SIGILL.
    torch.cpu._init_amx()


@dataclass
class DirectoryInit(WeightTransferInitInfo):
    """Settings for the start of the transfer engine, which needs no settings."""


@dataclass
class DirectoryUpdate(WeightTransferUpdateInfo):
    """Arguments of a weight update. `path` is a directory with weights and their manifest."""

    path: str = ""


class DirectoryTransfer(WeightTransferEngine[DirectoryInit, DirectoryUpdate]):
    """Backend that loads the safetensors files of a directory into the running model."""

    init_info_cls = DirectoryInit
    update_info_cls = DirectoryUpdate
    checksum: str | None = None
    """Checksum of the current weights; None before the first update."""
    incoming: str | None = None
    """Checksum of the weights that the current update has loaded; None before."""
    problem: str | None = None
    """Reason why loading failed, or None. An exception instead would end vLLM's engine."""

    def init_transfer_engine(self, init_info: DirectoryInit) -> None:
        """Do nothing, because this backend needs no setup."""

    def start_weight_update(self) -> None:
        """Remove the state of an earlier update that was not finished."""
        type(self).incoming = type(self).problem = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights in a directory. If this fails, set `problem` to the reason."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            type(self).problem = f"{type(error).__name__}: {error}"
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: DirectoryUpdate) -> None:
        """Check received or stored weights, then replace the weights. Damaged ones change no weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        received = _RECEPTION.take(update_info.path)
        if received is None:
            directory = _weights_folder(update_info.path)
            digests = _VERIFICATION.take(directory)
            shapes, tensors = _read_shapes(directory), _iterate_tensors(directory, sorted(digests))
        else:
            digests, content = received
            shapes = {name: list(tensor.shape) for name, tensor in content.items()}
            tensors = iter(content.items())
        self._check_tensors(update_info.path, shapes)
        _drop_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors)
        type(self).incoming = _combine_digests(digests)

    def _check_tensors(self, source: str, new: dict[str, list[int]]) -> None:
        """Raise `ValueError` unless the shapes of all new tensors are those of the served model's tensors.

        Without this check, vLLM would keep the old value of a missing tensor. An unknown tensor would end
        vLLM's engine. Parts that are not trained are not sent, and keep their values.
        """
        layers = getattr(self.model_config.hf_text_config, "num_hidden_layers", None)
        stored = _read_shapes(Path(self.model_config.model))
        expected = {k: v for k, v in stored.items() if k in new or not _is_untrained(k, layers)}
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            expected.pop(_HEAD, None)
            new.pop(_HEAD, None)
        for name in sorted(expected.keys() | new.keys()):
            if expected.get(name) != new.get(name):
                raise ValueError(
                    f"{source}: {name} has the shape {new.get(name, '(missing)')}; "
                    f"in the served model: {expected.get(name, '(missing)')}"
                )

    def finish_weight_update(self) -> None:
        """Prepare the layers for computation. If the update loaded no weights, do nothing."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.incoming is None:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        type(self).checksum = self.incoming

    def shutdown(self) -> None:
        """Do nothing, because this backend holds no resources."""


def _is_untrained(name: str, layers: int | None) -> bool:
    """Return True for a tensor of multi-token prediction or of an encoder of images or sound.

    The layers of multi-token prediction may follow the `layers` of the model.
    """
    number = _LAYER.search(name)
    is_beyond = number is not None and layers is not None and int(number[1]) >= layers
    return is_beyond or _UNTRAINED.search(name) is not None


def _weights_folder(path: str) -> Path:
    """Return the directory `path`. Raise `ValueError` if vLLM may not read weights from this directory."""
    folder: Path = _foreign_files.data_folder(Path(path), Path(os.environ["BUCKEYE_VLLM_WEIGHTS_DIR"]))
    return folder


class Verification:
    """Verification of the files of one directory in threads, while the engine samples.

    Each of several workers verifies its share of the files. The client updates no worker before all are done.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "verify")
        self._subject: tuple[Path, str | None] | None = None
        self._result: Future[dict[str, str]] | None = None

    def start(self, directory: Path, share: slice) -> Future[dict[str, str]]:
        """Start to verify a share of the files, unless it runs or is done. Return the result."""
        subject = directory, _published_checksum(directory)
        if self._result is None or self._subject != subject:
            self._subject = subject
            self._result = self._threads.submit(_verify_files, directory, share)
        return self._result

    def take(self, directory: Path) -> dict[str, str]:
        """Wait for the result for a directory, and forget it. Without one, verify all files."""
        result = self.start(directory, slice(None))
        self.forget()
        return result.result()

    def forget(self) -> None:
        """Forget the result, so that the next `start` verifies again."""
        self._result = None


_VERIFICATION = Verification()


class Reception:
    """Weights that a thread receives in memory from the trainer, while the engine samples."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._result: Future[tuple[dict[str, str], dict[str, torch.Tensor]]] | None = None

    def start(self, path: str, info: dict[str, Any], rank: int) -> None:
        """Start to receive the weights whose files the trainer writes to `path`, as this `rank`."""
        folder = _weights_folder(str(Path(info["store"]).parent))
        result: Future[tuple[dict[str, str], dict[str, torch.Tensor]]] = Future()

        def receive() -> None:
            try:
                group = _broadcast_group.BroadcastGroup(
                    folder / Path(info["store"]).name,
                    rank,
                    info["size"],
                    loopback=info["loopback"],
                    seconds=info["seconds"],
                )
                digests = info["manifest"]["files"]
                files = group.receive(info["sizes"], info["shared"], copies=True)
                group.finish()
                contents = {name: memoryview(file.numpy()) for name, file in files.items()}
                if _weights_digest.digest_contents(contents) != digests:
                    raise ValueError("the digest of the received weights differs from the published one")
                tensors = [
                    pair
                    for file in files.values()
                    for pair in _broadcast_group.split_safetensors(file).items()
                ]
                result.set_result((digests, dict(tensors)))
            except Exception as error:
                result.set_exception(error)

        self._path, self._result = path, result
        threading.Thread(target=receive, name="receive", daemon=True).start()

    def problem(self, path: str) -> str | None:
        """Return None until the weights are received, then "", or the reason if they are not."""
        if self._result is None or self._path != path:
            return "no broadcast was started"
        if not self._result.done():
            return None
        error = self._result.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def take(self, path: str) -> tuple[dict[str, str], dict[str, torch.Tensor]] | None:
        """Return and forget the digests of the received files and the tensors, or None without any."""
        is_received = self.problem(path) == ""
        result, self._result = self._result, None
        return result.result() if is_received and result is not None else None

    def forget(self) -> None:
        """Forget the weights, so that the next update reads files."""
        self._result = None


_RECEPTION = Reception()


def _verify_files(directory: Path, share: slice) -> dict[str, str]:
    """Verify a share of the files in a directory's manifest. Return the digests of all files.

    Raise `ValueError` if a file differs from the manifest.
    """
    published: dict[str, str] = json.loads(_foreign_files.read_regular(directory / _MANIFEST))["files"]
    names = sorted(published)[share]
    paths = [directory / _foreign_files.check_file_name(name) for name in names]
    for name, path, digest in zip(names, paths, _weights_digest.digest_files(paths), strict=True):
        if digest != published[name]:
            raise ValueError(f"{path} is damaged: its digest differs from the published one")
    return published


def _published_checksum(directory: Path) -> str | None:
    """Return the checksum in the manifest of a directory, or None without a valid manifest."""
    try:
        return str(json.loads(_foreign_files.read_regular(directory / _MANIFEST))["checksum"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _combine_digests(digests: dict[str, str]) -> str:
    """Return one SHA-256 for all files. The trainer computes the checksum in its manifest in this way."""
    lines = "".join(f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _read_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a directory's safetensors files, from their headers."""
    shapes: dict[str, list[int]] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    return shapes


def _iterate_tensors(directory: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        with safe_open(directory / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118, not a mapping
                yield key, file.get_tensor(key)


def _drop_expert_kernels(model: torch.nn.Module) -> None:
    """Drop the kernels of experts, so that vLLM makes them again from new weights. Do nothing on a GPU.

    On a CPU, vLLM pads and packs the weights of experts only when it makes their kernel.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack the weights of heads that are tied to the embedding. Do nothing on a GPU.

    On a CPU, vLLM packs the weights of a linear layer when it loads the layer. An update does not load a tied
    head, so the head would compute with the old weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """Mixin of vLLM's worker. A client calls its methods through /collective_rpc."""

    model_config: Any
    parallel_config: Any
    rank: int
    buckeye_adapter: int | None = None
    """Id that vLLM gave the run's adapter, or None before the adapter is registered."""

    def buckeye_verify(self, path: str) -> str | None:
        """Verify this worker's share of the files in the directory `path`, while the engine samples.

        Return None until this is done, then "", or the reason if a file is damaged.
        """
        workers = self.parallel_config.world_size
        _RECEPTION.forget()
        try:
            done = _VERIFICATION.start(_weights_folder(path), slice(self.rank % workers, None, workers))
            if not done.done():
                return None
            done.result()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _VERIFICATION.forget()
            return f"{type(error).__name__}: {error}"
        return ""

    def buckeye_receive(self, path: str, info: dict[str, Any]) -> str:
        """Start to receive weights from the trainer, while the engine samples. Return an error, or "".

        The first worker of this server has the rank in `info`.
        """
        try:
            _RECEPTION.start(path, info, info["rank"] + self.rank)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def buckeye_received(self, path: str) -> str | None:
        """Return None until the weights of `path` are received, then "", or the reason if they are not."""
        return _RECEPTION.problem(path)

    def buckeye_load_adapter(self, path: str) -> str | None:
        """Replace the loaded adapter by the adapter in the directory `path`.

        If no adapter is loaded, only check the files. Return the error as text, or None. The error is not
        raised, because an exception would end vLLM's engine.
        """
        try:
            directory = _weights_folder(path)
            digests = _VERIFICATION.take(directory)
            if self.buckeye_adapter is None:
                # vLLM's ids increase, so the largest id is that of the adapter registered last
                self.buckeye_adapter = max(self.list_loras(), default=None)  # type: ignore[attr-defined]
            if self.buckeye_adapter is None:
                return None
            self.add_lora(  # type: ignore[attr-defined]
                LoRARequest("buckeye", self.buckeye_adapter, str(directory), load_inplace=True)
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        DirectoryTransfer.checksum = _combine_digests(digests)
        return None

    def buckeye_weights(self, path: str | None = None) -> dict[str, str | int | bool | None]:
        """Return the state of the worker.

        `checksum` is that of the current weights, and `incoming` that of weights that are loaded but not yet
        used. `problem` is the error of the update. `updating` is true between its start and its end.
        `max_num_seqs` is the number of sequences that the server decodes at a time. `can_sleep` is true if
        the server can release its memory. `published` is the checksum in the manifest of the directory
        `path`.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        return {
            "checksum": DirectoryTransfer.checksum,
            "incoming": DirectoryTransfer.incoming,
            "problem": DirectoryTransfer.problem,
            "updating": bool(getattr(self, "_weight_update_active", False)),
            "pid": os.getpid(),
            "process": _PROCESS,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "published": None if path is None else _published_checksum(Path(path)),
            "can_sleep": bool(self.model_config.enable_sleep_mode),
            "can_receive": config.parallel_config.data_parallel_size == 1,
            "max_num_seqs": config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size,
        }


if _BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(_BACKEND, DirectoryTransfer)
