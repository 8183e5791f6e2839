"""Export of one checkpoint: choose, write, verify, describe, push."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from buckeye.base.hub import HubRepository, is_hub_name
from buckeye.base.storage import write_directory
from buckeye.errors import UsageError
from buckeye.launch.preflight.model import cached_revision, fetch_model, find_model, run_directory
from buckeye.monitor.redact import redact
from buckeye.runs.checkpoint_facts import (
    CheckpointChoice,
    base_model,
    choose_checkpoint,
    is_local,
    read_config,
)
from buckeye.runs.model_card import model_card
from buckeye.runs.reader import value_at
from buckeye.runs.training_data import read_comparison_texts
from buckeye.transport.checkpoint import (
    CheckpointInfo,
    Score,
    read_scores,
    trainer_state_directory,
    verify_checkpoint,
)

if TYPE_CHECKING:
    from buckeye.trainer.output.checkpoint_export import ComparisonTexts

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """Request to export a checkpoint.

    `step` is best, last, a number, or None: the best checkpoint, else the newest. `output` defaults to
    `<run>/exports/step_<N>`, or `step_<N>-merged` for a merged adapter. `push` is the model repository on the
    hub to upload to; None: no upload. `private` creates it as a private repository.
    """

    run: Path
    step: str | None
    merge_lora: bool
    output: Path | None
    push: str | None
    private: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """Exported model. `url` is set if it was pushed. `adapter` is True if it needs its base model."""

    directory: Path
    step: int
    adapter: bool
    url: str | None


def export_model(request: ExportRequest, tell: Callable[[str], None]) -> ExportedModel:
    """Export a checkpoint of a run, verify it, and push it if requested.

    Verification loads the export with transformers and compares it with the checkpoint. Existing files are
    never overwritten. To retry a failed upload, an earlier export with the default name is pushed unchanged
    if it is newer than its checkpoint.

    Raise `UsageError`, before anything is written, for an invalid request. Raise `RunError` if the export
    differs from the checkpoint's model, or if the upload fails.
    """
    request = replace(request, run=run_directory(str(request.run)) or request.run)
    kind, config = read_config(request.run)
    if request.private and request.push is None:
        raise UsageError(
            "--private needs --push", code="BK-CLI-CONFLICT", hint="add --push ORG/NAME, or remove --private"
        )
    hub = _repository(request.push, private=request.private) if request.push is not None else None
    scores = read_scores(request.run)
    choice = choose_checkpoint(request.run, request.step, scores)
    base = base_model(kind, config)
    _check_pushed(request, choice.info, base)
    name = f"step_{choice.info.step}{'-merged' if request.merge_lora else ''}"
    directory = request.output or request.run / "exports" / name
    tell(f"step {choice.info.step}: {choice.reason}")
    quantization = value_at(config, "trainer.model.quantization" if kind == "rl" else "model.quantization")
    if isinstance(quantization, str):
        tell(f"the adapter was trained on a {quantization} base; the export belongs to the unrounded base")
    if hub is not None and request.output is None and _exported_before(directory, choice.info, request):
        tell(f"{directory}: exported and verified before")
    elif directory.exists():
        raise UsageError(f"{directory} exists", code="BK-FILE-EXISTS", hint="name another directory with -o")
    else:
        title = hub.name.partition("/")[2] if hub is not None else directory.name
        passages = read_comparison_texts(request.run, kind, config, choice.info.step)
        _export(request, choice, scores, base, passages, directory, title=title, tell=tell)
    url = None
    if hub is not None:
        tell(f"uploading to {hub.name} ({hub.visibility})")
        url = hub.push(directory, "Model exported by Buckeye")
    adapter = (directory / _ADAPTER_CONFIG).exists()
    return ExportedModel(directory=directory, step=choice.info.step, adapter=adapter, url=url)


def _repository(name: str, *, private: bool) -> HubRepository:
    """Return the repository to push to. Raise `UsageError` if its name is invalid or it has files."""
    if not is_hub_name(name):
        raise UsageError(
            f"--push {name} is not the name of a model repository",
            code="BK-CLI-ARGUMENT",
            hint="write ORG/NAME",
        )
    repository = HubRepository(name, "model", private=private)
    if repository.files:
        raise UsageError(
            f"--push {name}: the repository is not empty", code="BK-FILE-EXISTS", hint="choose another name"
        )
    return repository


def _exported_before(directory: Path, info: CheckpointInfo, request: ExportRequest) -> bool:
    """Return True if the directory has the requested export. An export that exists is complete."""
    if not (directory / "README.md").exists():
        return False
    adapter = (directory / _ADAPTER_CONFIG).exists()
    trained_adapter = (trainer_state_directory(info) / "adapter").is_dir()
    newer = directory.stat().st_mtime >= info.path.stat().st_mtime
    return newer and adapter == (trained_adapter and not request.merge_lora)


def _check_pushed(request: ExportRequest, info: CheckpointInfo, base: str) -> None:
    """Raise `UsageError` for the upload of an adapter whose base model is only on this machine."""
    adapter = (trainer_state_directory(info) / "adapter").is_dir() and not request.merge_lora
    if request.push is not None and adapter and is_local(base):
        raise UsageError(
            f"--push {request.push}: the base model of the adapter is a local folder: {base}",
            code="BK-ADAPTER",
            hint="add --merge-lora to push a complete model",
        )


def _export(
    request: ExportRequest,
    choice: CheckpointChoice,
    scores: Sequence[Score],
    base: str,
    passages: ComparisonTexts,
    directory: Path,
    *,
    title: str,
    tell: Callable[[str], None],
) -> None:
    """Write and verify a model and its card."""
    verify_checkpoint(choice.info)
    state = trainer_state_directory(choice.info)
    verified: list[str] = []

    def fill(temporary: Path) -> None:
        verified.append(_write(state, temporary, base, passages, merge_lora=request.merge_lora, tell=tell))
        card = model_card(
            request.run,
            choice,
            scores,
            title=title,
            verified=verified[0],
            adapter=(temporary / _ADAPTER_CONFIG).exists(),
        )
        (temporary / "README.md").write_text(redact(card), encoding="utf-8")

    write_directory(directory, fill)
    tell(f"{directory}: {verified[0]}")


def _write(
    state: Path,
    out: Path,
    base: str,
    passages: ComparisonTexts,
    *,
    merge_lora: bool,
    tell: Callable[[str], None],
) -> str:
    """Write the model or the adapter, and return the verification result as text."""
    from buckeye.trainer.output import weight_rounding
    from buckeye.trainer.output.checkpoint_export import (
        is_adapter_checkpoint,
        write_adapter,
        write_merged,
        write_model,
    )

    if not is_adapter_checkpoint(state):
        if merge_lora:
            raise UsageError(
                "--merge-lora: the run trained all weights, so it has no adapter",
                code="BK-CLI-CONFLICT",
                hint="leave --merge-lora out: the export is a complete model",
            )
        dtype = _base_dtype(base)
        if dtype is None:
            tell(f"{base} was not found: writing the weights in float32")
        verified = write_model(state, out, dtype=dtype, passages=passages)
    elif merge_lora:
        verified = write_merged(state, out, base=fetch_model(base), passages=passages)
    else:
        folder, is_here = fetch_model(base), is_local(base)
        if is_here:
            tell(
                f"the adapter belongs to {folder}, which only this machine has: "
                "--merge-lora exports a complete model"
            )
        verified = write_adapter(
            state,
            out,
            base=folder,
            base_name=str(folder) if is_here else base,
            revision=None if is_here else cached_revision(folder),
            passages=passages,
        )
    if verified.divergence > weight_rounding.KL_WARNING_THRESHOLD:
        exact = "; the adapter alone is exact (without --merge-lora)" if merge_lora else ""
        tell(
            f"warning: rounding the weights to {verified.dtype} changed the policy as much as a training "
            f"step may change it{exact}"
        )
    return str(verified)


def _base_dtype(base: str) -> str | None:
    """Return the stored dtype of the initial model; None if the model is not on this machine."""
    found = find_model(base)
    if found is None:
        return None
    config = json.loads((found / "config.json").read_text(encoding="utf-8"))
    return config.get("dtype") or config.get("torch_dtype")
