"""The formats that rollouts are written in. Each function fills a directory, and says how many it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from buckeye.base.distribution import need
from buckeye.monitor.conversation import Message, conversation
from buckeye.runs.frames import COLUMNS
from buckeye_audit.exchange.played import Played, file_name

Format = Literal["eval", "sts", "parquet", "jsonl"]
_BATCH = 1000
_ROLES = ("user", "assistant", "system", "tool")


def write_jsonl(played: Iterable[Played], directory: Path, model: str) -> int:
    """One file of JSON Lines: the columns of the frame `rollouts`, and `messages`."""
    written = 0
    with (directory / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for one in played:
            file.write(json.dumps({**one.row, "messages": _messages(one)}, ensure_ascii=False) + "\n")
            written += 1
    return written


def write_parquet(played: Iterable[Played], directory: Path, model: str) -> int:
    """One file with the same columns; `messages` are JSON."""
    need("pyarrow", "Parquet")
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {**COLUMNS["rollouts"], "messages": "string"}
    schema = pa.schema([pa.field(name, pa.type_for_alias(kind)) for name, kind in kinds.items()])
    rest, written = iter(played), 0
    with parquet.ParquetWriter(directory / "rollouts.parquet", schema, compression="zstd") as writer:
        while some := list(islice(rest, _BATCH)):
            rows = [{**one.row, "messages": _as_json(_messages(one))} for one in some]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            written += len(rows)
    return written


def write_sts(played: Iterable[Played], directory: Path, model: str) -> int:
    """A file a rollout in the hub's Session Trace Simple Format: a header line, then a line a message."""
    folder = directory / "sessions"
    folder.mkdir()
    written, taken = 0, set[str]()
    for one in _with_texts(played):
        row = one.row
        number = f"{row['group']}-{row['number']}{f'-attempt-{written}' if row['retried'] else ''}"
        name = f"{row['split']}-{row['env']}-step-{row['step']}-{number}"
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
        header = {
            "type": "session",
            "harness": "buckeye",
            "id": name,
            "name": f"{row['task']}: {reward}",
            **{key: row[key] for key in ("split", "step", "env", "task", "reward", "stop_reason", "error")},
        }
        lines = [header, *({"type": "message", "message": said} for said in _sts_messages(one, model))]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{file_name(name, taken)}.jsonl").write_text(text, encoding="utf-8")
        written += 1
    return written


def _sts_messages(one: Played, model: str) -> Iterator[Mapping[str, Any]]:
    assert one.rollout is not None
    for said in conversation(one.rollout):
        message: dict[str, Any] = {"role": _role(said), "content": said.text}
        if said.reasoning:
            message["reasoningContent"] = said.reasoning
        if said.calls:
            message["toolCalls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.calls
            ]
        if said.answers is not None:
            message["toolCallId"] = said.answers
        if said.role == "assistant":
            message["model"] = model
        yield message


def _role(said: Message) -> str:
    return said.role if said.role in _ROLES else "system" if said.role == "developer" else "user"


def _with_texts(played: Iterable[Played]) -> Iterator[Played]:
    return (one for one in played if one.rollout is not None)


def _messages(one: Played) -> list[dict[str, Any]] | None:
    if one.rollout is None:
        return None
    return one.rollout.messages or [{"role": m.role, "content": m.text} for m in conversation(one.rollout)]


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def write_eval(played: Iterable[Played], directory: Path, model: str) -> int:
    """A log of Inspect for each step and environment."""
    need("inspect_ai", "Inspect's logs")
    from buckeye_audit.exchange.inspect_log import write_logs

    return write_logs(_with_texts(played), directory, model)


WRITERS: Mapping[Format, Callable[[Iterable[Played], Path, str], int]] = {
    "eval": write_eval,
    "sts": write_sts,
    "parquet": write_parquet,
    "jsonl": write_jsonl,
}
