"""Rollouts of a run: its groups, the replies of one group, and a full rollout. Texts are read on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from buckeye.base.json_lines import texts_in
from buckeye.errors import UsageError
from buckeye.monitor.conversation import parse_message
from buckeye.monitor.rollouts import RecordedRollout, shorten_middle
from buckeye.runs import Run
from buckeye.ui.run_catalog import OpenRun

_MAX_GROUPS = 100_000  # from the newest steps; the page holds all of them
_MAX_LINE_BYTES = 64_000_000  # bytes; longer rollouts are not read
_MAX_TEXT_LENGTH = 200_000  # characters sent of one message, half from each end
_MAX_COLUMN_TEXT_LENGTH = 4_000  # characters of a message where the page shows replies in columns
_MAX_MESSAGES = 500
_MAX_CALLS = 100  # per message
_MAX_SEARCHED_BYTES = 256_000_000  # bytes

_COLUMNS = {
    "split": "split",
    "step": "step",
    "group": "grp",
    "env": "env",
    "task": "task",
    "dropped": "dropped",
    "rollouts": "count(*)",
    "reward": "avg(reward)",
    "low": "min(reward)",
    "high": "max(reward)",
    "rewards": "group_concat(round(reward, 3))",
    "errored": "count(*) - count(reward)",
    "truncated": "sum(truncated)",
    "tokens": "avg(completion_tokens)",
    "seconds": "max(seconds)",
    "version": "min(oldest_version)",
}
_GROUPS = (
    f"SELECT {', '.join(_COLUMNS.values())} FROM rollouts WHERE retried = 0 "  # noqa: S608  constant names
    "GROUP BY split, step, env, grp, dropped ORDER BY step DESC, split DESC, env, grp LIMIT ?"
)
_FIGURES = (
    *("number", "reward", "shaped_reward", "advantage", "components", "stop_reason", "error", "truncated"),
    *("cut", "retried", "seconds", "sampling_seconds", "turns", "segments", "completion_tokens"),
    *("oldest_version", "task", "env", "dropped", "text"),
)
_GROUP_ROLLOUTS = (
    f"SELECT path, at, bytes, {', '.join(_FIGURES)} FROM rollouts "  # noqa: S608  constant names
    "WHERE split = ? AND step = ? AND grp = ? "
)


class GroupAddress(msgspec.Struct, forbid_unknown_fields=True):
    """Address of a group of rollouts. Groups of an evaluation also need its environment, `env`."""

    step: int
    group: int
    split: str = "train"
    env: str = ""


class RolloutAddress(GroupAddress):
    """Address of a rollout of a group."""

    number: int = 0


class RolloutSearch(msgspec.Struct, forbid_unknown_fields=True):
    """Search for a text in the rollouts of a step: in messages, errors and the recorded `text`."""

    step: int
    text: str
    split: str = "train"


def groups(run: OpenRun) -> dict[str, Any]:
    """Return the figures of all groups in columns, the newest step first.

    `left_out` is the number of older groups, and `unreadable` the number of invalid lines.
    """
    stamp = (run.stamp()["rollouts"], run.stamp()["evals"])
    if run.cache.get("groups", (None,))[0] == stamp:
        return dict(run.cache["groups"][1])
    with run.read() as opened:
        rows = opened.query(_GROUPS, _MAX_GROUPS)
        left_out = 0 if len(rows) < _MAX_GROUPS else opened.query(_COUNT)[0][0] - len(rows)
        unreadable = opened.query("SELECT sum(unreadable) FROM files")[0][0] or 0
    columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
    answer = {"left_out": left_out, "unreadable": unreadable, **dict(zip(_COLUMNS, columns, strict=True))}
    run.cache["groups"] = (stamp, answer)
    return answer


_COUNT = (
    "SELECT count(*) FROM (SELECT 1 FROM rollouts WHERE retried = 0 GROUP BY split, step, env, grp, dropped)"
)


def group(run: OpenRun, address: GroupAddress) -> dict[str, Any]:
    """Return the prompt of a group, and its replies with their rewards. Long texts are shortened."""
    with run.read() as opened:
        found = list(_rollouts(opened, address, ""))
    shown = [_page_rollout(figures, recorded, _MAX_COLUMN_TEXT_LENGTH) for figures, recorded in found]
    prompts = [len(item["messages"]) - len(_after_prompt(item["messages"])) for item in shown]
    prompt = shown[0]["messages"][: prompts[0]]
    for item, until in zip(shown, prompts, strict=True):
        item["messages"] = item["messages"][until:]
    return {"prompt": prompt, "rollouts": shown}


def rollout(run: OpenRun, address: RolloutAddress) -> dict[str, Any]:
    """Return a rollout with its conversation.

    `text_unavailable` is true if the conversation was deleted or cannot be read.
    """
    with run.read() as opened:
        found = next(_rollouts(opened, address, "AND number = ? AND retried = 0 ", address.number))
    return _page_rollout(*found, _MAX_TEXT_LENGTH)


def search(run: OpenRun, address: RolloutSearch) -> dict[str, Any]:
    """Return the rollouts of a step that contain a text, ignoring case.

    `all` is false if the search ended early, after `_MAX_SEARCHED_BYTES`.
    """
    found: list[dict[str, Any]] = []
    wanted, read = address.text.casefold(), 0
    with run.read() as opened:
        for path, at, size, group_, number, env in opened.query(_STEP_ROLLOUTS, address.split, address.step):
            read += size
            if read > _MAX_SEARCHED_BYTES:
                return {"found": found, "all": False}
            recorded = _recorded(opened, path, at, size, group_, number)
            searched = () if recorded is None else (recorded.messages, recorded.error, recorded.text)
            if any(wanted in text.casefold() for part in searched for text in texts_in(part)):
                found.append({"group": group_, "number": number, "env": env})
    return {"found": found, "all": True}


_STEP_ROLLOUTS = (
    "SELECT path, at, bytes, grp, number, env FROM rollouts WHERE split = ? AND step = ? AND retried = 0"
)


def _rollouts(
    opened: Run, address: GroupAddress, more: str, *values: Any
) -> Iterator[tuple[dict[str, Any], RecordedRollout | None]]:
    """Yield the index row and the record of each rollout. Raise `UsageError` if no rollout is found."""
    of_env, env = ("AND env = ? ", [address.env]) if address.env else ("", [])
    sql = f"{_GROUP_ROLLOUTS}{of_env}{more}ORDER BY number, at"
    rows = opened.query(sql, address.split, address.step, address.group, *env, *values)
    if not rows:
        raise UsageError(
            f"step {address.step} has no rollout of group {address.group}, or it was deleted",
            code="BK-RUN-NO-DATA",
        )
    for path, at, size, *row in rows:
        figures = dict(zip(_FIGURES, row, strict=True))
        yield figures, _recorded(opened, path, at, size, address.group, figures["number"])


def _recorded(opened: Run, path: str, at: int, size: int, group: int, number: int) -> RecordedRollout | None:
    """Return a rollout from its file; None if it is missing, invalid, or too long."""
    return None if size > _MAX_LINE_BYTES else opened.text_at(path, at, size, group, number)


def _page_rollout(
    figures: Mapping[str, Any], recorded: RecordedRollout | None, longest: int
) -> dict[str, Any]:
    """Return a rollout in the form that the page shows."""
    optional = ("shaping", "turn_rewards", "advantages", "explanations")
    messages = [] if recorded is None else recorded.messages
    trace = [] if recorded is None else recorded.trace
    return {
        **figures,
        "components": json.loads(figures["components"] or "{}"),
        **{name: getattr(recorded, name, None) or None for name in optional},
        "trace": [_cut(text, longest)[0] for text in trace[:50]],
        "error": None if figures["error"] is None else _cut(figures["error"], longest)[0],
        "text_unavailable": recorded is None,
        "messages": [_message(item, longest) for item in messages[:_MAX_MESSAGES]],
        "messages_left_out": max(0, len(messages) - _MAX_MESSAGES),
    }


def _message(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return a message: role, text, reasoning and calls. `left_out` is the number of characters cut."""
    message = parse_message(given)
    text, left_out = _cut(message.text, longest)
    calls = [
        {"name": call.name, "arguments": _cut(call.arguments, longest)[0]}
        for call in message.calls[:_MAX_CALLS]
    ]
    reasoning = _cut(message.reasoning, longest)[0]
    return {"role": message.role, "text": text, "left_out": left_out, "reasoning": reasoning, "calls": calls}


def _cut(text: str, longest: int) -> tuple[str, int]:
    """Return a text without its middle if it is too long, and the number of characters left out."""
    return shorten_middle(text, longest), max(0, len(text) - longest)


def _after_prompt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages from the first reply on."""
    first = next((at for at, item in enumerate(messages) if item["role"] == "assistant"), len(messages))
    return messages[first:]
