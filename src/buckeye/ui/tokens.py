"""Tokens of a rollout: their texts, and the values that the run recorded for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buckeye.errors import UsageError
from buckeye.runs import Run
from buckeye.ui.rollouts import RolloutAddress
from buckeye.ui.run_catalog import OpenRun

if TYPE_CHECKING:
    from buckeye.runs.trained_step import TrainedStep

_MOST_TOKENS = 40_000
_LARGEST_TOKENIZER = 200_000_000  # bytes
_FILE = "tokenizer.json"
_COLUMNS = ("trained", "reason", "sampler_logprob", "trainer_logprob", "advantage", "version", "turn")


def tokens(run: OpenRun, asked: RolloutAddress) -> dict[str, Any]:
    """Return the training samples of a rollout, with one list per column.

    A value is None if it was not computed, for example for tokens of the context. Raise `UsageError` if the
    run did not keep the tokens of the step.
    """
    with run.read() as opened:
        kept = opened.kept_steps
        found = _step(run, opened, asked.step) if asked.step in kept else None
        if found is None:
            others = f"; kept: steps {kept[0]} to {kept[-1]}" if kept else ""
            raise UsageError(f"the tokens of step {asked.step} were not kept{others}", code="BK-RUN-NO-DATA")
        step, columns = found
        where = _tokenizer_file(opened)
    decode, missing = _decoder(run, where)
    samples, left = [], _MOST_TOKENS
    for at, (group, number, segment, _) in enumerate(step.origins):
        if (group, number) != (asked.group, asked.number):
            continue
        begin, end = int(step.starts[at]), int(step.starts[at + 1])
        end, left = min(end, begin + left), left - (end - begin)
        ids = [int(token_id) for token_id in columns["token_id"][begin:end]]
        shown = {name: _values(columns[name], slice(begin, end)) for name in _COLUMNS}
        samples.append({"segment": segment, "ids": ids, "texts": decode(ids) if decode else None, **shown})
        if left <= 0:
            break
    if not samples:
        raise UsageError(
            f"the batch of step {asked.step} has no sample of this rollout", code="BK-RUN-NO-DATA"
        )
    return {"samples": samples, "missing": missing, "left_out": max(0, -left)}


def _step(run: OpenRun, opened: Run, number: int) -> tuple[TrainedStep, Mapping[str, Any]] | None:
    """Return a step's batch, and the columns of its tokens. The last requested step is cached."""
    stamp = (number, (opened.path / "trained" / f"step_{number}").stat().st_mtime_ns)
    if run.cache.get("step", (None,))[0] != stamp:
        found = opened.trained(number)
        run.cache["step"] = (stamp, None if found is None else (found, found.token_columns()))
    kept: tuple[TrainedStep, Mapping[str, Any]] | None = run.cache["step"][1]
    return kept


def _values(column: Any, rows: slice) -> list[Any]:
    """Return the values of a column. Nulls of a nullable column become None."""
    if not isinstance(column, tuple):
        return list(column[rows].tolist())
    known = zip(column[0][rows].tolist(), column[1][rows].tolist(), strict=True)
    return [None if is_null else value for value, is_null in known]


def _tokenizer_file(run: Run) -> Path | None:
    """Return the tokenizer file of the newest weights, else of the initial model, or None."""
    if run.tokenizer_directory is not None:
        return run.tokenizer_directory / _FILE
    name = run.setting("trainer.model.name") or run.setting("model.name")
    with suppress(ImportError, ValueError, OSError):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(str(name), _FILE)
        return Path(found) if isinstance(found, str) else None
    return None


def _decoder(run: OpenRun, path: Path | None) -> tuple[Any, str | None]:
    """Return a function that decodes token ids. Without a tokenizer, return None and the reason."""
    if path is None:
        return (
            None,
            "No tokenizer found: neither the run's weights nor its model are on this machine. Ids are shown.",
        )
    known = run.cache.get("decoder")
    if known and known[0] == path:
        return known[1], None
    try:
        from tokenizers import Tokenizer

        if path.stat().st_size > _LARGEST_TOKENIZER:
            return None, f"{path} is too large to be read."
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        return None, f"{path} cannot be read: {error}"

    def decode(ids: Sequence[int]) -> list[str]:
        """Return the text of each id. A character split over several tokens belongs to the last of them."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token_id) or "" for token_id in ids]

    run.cache["decoder"] = (path, decode)
    return decode, None
