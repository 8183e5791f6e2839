"""Exporting one checkpoint: choose, write, verify, describe, push."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.checkpoint import CheckpointInfo, Score, read_scores, trainer_state, verify_checkpoint
from buckeye.errors import UsageError
from buckeye.monitor.redact import redacted
from buckeye.run.export.card import model_card
from buckeye.run.export.choose import Choice, choose_checkpoint
from buckeye.run.export.facts import RunFacts, evaluation_reach, gather_facts, public_name, read_config
from buckeye.run.export.push import Hub
from buckeye.run.model_files import fetch_model, find_model
from buckeye.storage import write_directory

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """`step` is best, last or a number; `output` is None for `<run>/exports/step_<N>`; `push` is a model
    repository of the hub or None, which is made `private` or not."""

    run: Path
    step: str
    merge_lora: bool
    output: Path | None
    push: str | None
    private: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Where the model is now; `url` on the hub, if it was pushed. An `adapter` needs its base."""

    directory: Path
    step: int
    adapter: bool
    url: str | None


def export_model(request: ExportRequest, tell: Callable[[str], None]) -> Exported:
    """Export a checkpoint of a run. What is in `directory` afterwards has been loaded with transformers and
    compared with the checkpoint; nothing that exists is overwritten. An export under the default name that
    is newer than its checkpoint is pushed as it is, such as one whose upload has failed.

    Raises UsageError, before anything is written, for what cannot be exported; RunError if what was written
    is not the checkpoint's model, or if the upload fails.
    """
    _, config = read_config(request.run)
    if request.private and request.push is None:
        raise UsageError("--private says how to --push; add --push ORG/NAME, or leave it out")
    hub = Hub(request.push, private=request.private) if request.push is not None else None
    scores = read_scores(request.run)
    choice = choose_checkpoint(request.run, request.step, scores, reach=evaluation_reach(config))
    directory = request.output or request.run / "exports" / f"step_{choice.info.step}"
    tell(f"step {choice.info.step}: {choice.reason}")
    if hub is not None and request.output is None and _exported_before(directory, choice.info, request):
        tell(f"{directory}: exported and verified before")
    elif directory.exists():
        raise UsageError(f"{directory} exists, and nothing is overwritten. Name another directory with -o.")
    else:
        title = hub.name.partition("/")[2] if hub is not None else directory.name
        _export(request, choice, scores, directory, title=title, tell=tell)
    url = None
    if hub is not None:
        tell(f"uploading to {hub.name} ({hub.visibility})")
        url = hub.upload(directory)
    adapter = (directory / _ADAPTER_CONFIG).exists()
    return Exported(directory=directory, step=choice.info.step, adapter=adapter, url=url)


def _exported_before(directory: Path, info: CheckpointInfo, request: ExportRequest) -> bool:
    """Whether a directory, which is only ever written whole, is what the request asks for."""
    if not (directory / "README.md").exists():
        return False
    adapter = (directory / _ADAPTER_CONFIG).exists()
    trained_adapter = (trainer_state(info) / "adapter").is_dir()
    newer = directory.stat().st_mtime >= info.path.stat().st_mtime
    return newer and adapter == (trained_adapter and not request.merge_lora)


def _export(
    request: ExportRequest,
    choice: Choice,
    scores: Sequence[Score],
    directory: Path,
    *,
    title: str,
    tell: Callable[[str], None],
) -> None:
    """Write and verify a model and its card."""
    verify_checkpoint(choice.info)
    facts = gather_facts(request.run, choice, scores)
    state = trainer_state(choice.info)
    verified: list[str] = []

    def fill(temporary: Path) -> None:
        verified.append(_write(state, temporary, facts, merge_lora=request.merge_lora, tell=tell))
        card = model_card(
            facts,
            title=title,
            reason=f"step {choice.info.step}, {choice.reason}",
            verified=verified[0],
            adapter=(temporary / _ADAPTER_CONFIG).exists(),
        )
        (temporary / "README.md").write_text(redacted(card), encoding="utf-8")

    write_directory(directory, fill)
    tell(f"{directory}: {verified[0]}")


def _write(state: Path, out: Path, facts: RunFacts, *, merge_lora: bool, tell: Callable[[str], None]) -> str:
    """Write the model, or the adapter, and return what its verification says."""
    from buckeye.trainer.release import has_adapter, write_adapter, write_merged, write_model

    if not has_adapter(state):
        if merge_lora:
            raise UsageError("--merge-lora: the run has trained all weights; there is no adapter to merge.")
        dtype = _base_dtype(facts.base)
        if dtype is None:
            tell(f"{facts.base} is not here any more: the weights are written in float32")
        return str(write_model(state, out, dtype=dtype))
    base = fetch_model(facts.base)
    if merge_lora:
        return str(write_merged(state, out, base=base))
    if facts.base_id is None:
        tell(
            "the adapter belongs to a local model, which others do not have: "
            "--merge-lora exports a complete one"
        )
    return str(write_adapter(state, out, base=base, base_name=facts.base_id or public_name(facts.base)))


def _base_dtype(base: str) -> str | None:
    """What the weights of the model that training started from are stored as; None if it is not here any
    more."""
    found = find_model(base)
    if found is None:
        return None
    config = json.loads((found / "config.json").read_text(encoding="utf-8"))
    return config.get("dtype") or config.get("torch_dtype")
