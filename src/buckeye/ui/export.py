"""Export of a run as one HTML file that opens offline, with the texts of up to 8 MB of rollouts."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from buckeye.base.storage import step_directories, write_file
from buckeye.errors import BuckeyeError
from buckeye.monitor.redact import redact
from buckeye.ui import STATIC
from buckeye.ui.endpoints import call_endpoint, summary
from buckeye.ui.run_catalog import OpenRun

_MOST_TEXT = 8_000_000  # bytes of JSON for groups, rollouts and tokens
_WHOLE = ("status", "findings", "overview", "intervals", "groups", "logs", "events", "settings", "timeline")
_SCRIPT = re.compile(r'<script src="([^"]+)" defer></script>\n')
_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')


def export(run: OpenRun, path: Path) -> tuple[int, int]:
    """Write a run to one file. Return the number of groups with texts in the file, and of all groups.

    Raise `BuckeyeError` for a run without a recorded step.
    """
    if not run.steps and not step_directories(run.path / "evals"):
        raise BuckeyeError(f"{run.path} has no recorded step yet", code="BK-RUN-NO-DATA")
    answers = _answers(run)
    write_file(path, page(_replaced(redact(answers, by_name=False), _shared_names(run.path))))
    return answers["export"]["groups"], answers["export"]["of"]


def _shared_names(run: Path) -> dict[str, str]:
    """Return the local paths that a report must not show, and the names that replace them."""
    paths = {run.absolute(): run.absolute().name, Path.home(): "~"}
    return {str(path): name for path, name in paths.items() if len(path.parts) > 1}


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, names) for item in value]
    if isinstance(value, str):
        for path, name in names.items():
            value = value.replace(path, name)
    return value


def _answers(run: OpenRun) -> dict[str, Any]:
    """Return all answers, keyed by the address that the page requests."""
    answers: dict[str, Any] = {"runs": {"runs": [summary(run)], "only": run.name}}
    for name in _WHOLE:
        answers[address(run, name)] = call_endpoint(run, name, {})
    answers[address(run, "metrics")] = call_endpoint(run, "metrics", {"pattern": "", "most": "1000000"})
    groups, room, held = answers[address(run, "groups")], _MOST_TEXT, 0
    with run.read():
        for at in _spread(len(groups["step"])):
            asked = {"step": groups["step"][at], "group": groups["group"][at]}
            if groups["split"][at] != "train":
                asked |= {"split": groups["split"][at], "env": groups["env"][at]}
            found = _texts(run, asked)
            size = len(msgspec.json.encode(found))
            if size > room:
                break
            answers |= found
            room, held = room - size, held + 1
    answers["export"] = {"exported": time.time(), "groups": held, "of": len(groups["step"])}
    return answers


def _texts(run: OpenRun, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers for a group, its rollouts, and their tokens if the run kept them."""
    given = {name: str(value) for name, value in asked.items()}
    found = {address(run, "group", given): (group := call_endpoint(run, "group", given))}
    for rollout in group["rollouts"]:
        parameters = {**given, "number": str(rollout["number"])}
        for name in ("rollout", "tokens"):
            try:
                found[address(run, name, parameters)] = call_endpoint(run, name, parameters)
            except BuckeyeError:  # the run kept no tokens of this step
                continue
    return found


def _spread(count: int) -> Iterator[int]:
    """Yield all numbers below `count`, spread evenly: the ends, the middle, and so on."""
    given, parts = set[int](), 1
    while len(given) < count:
        for part in range(parts + 1):
            at = round(part * (count - 1) / parts)
            if at not in given:
                given.add(at)
                yield at
        parts *= 2


def address(run: OpenRun, endpoint: str, given: Mapping[str, Any] | None = None) -> str:
    """Return the address that the page requests: the endpoint, with `given` as sorted `URLSearchParams`."""
    words = urlencode(sorted((given or {}).items())).replace("~", "%7E").replace("%2A", "*")
    name = quote(run.name, safe="!~*'()")
    return f"runs/{name}/{endpoint}" + (f"?{words}" if words else "")


def page(answers: Mapping[str, Any]) -> str:
    """Return the page as one HTML text.

    A content security policy allows only the scripts and styles of the page, by their hashes. The embedded
    data has no `<`, so it cannot end its script element.
    """
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    scripts = [_file(name) for name in _SCRIPT.findall(html)]
    styles = [_file(name) for name in _STYLE.findall(html)]
    if any("</script" in text.lower() for text in scripts) or any("</style" in text for text in styles):
        raise AssertionError("a script or a style of the page would end its own element")
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")
    html = _STYLE.sub("", _SCRIPT.sub("", html)).replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    head, _, body = html.partition("</head>")
    inner = "\n".join(f"<script>{text}</script>" for text in scripts)
    held = f'<script type="application/json" id="answers">{data}</script>'
    start, _, end = body.rpartition("</body>")
    look = "".join(f"<style>{text}</style>" for text in styles)
    return f"{head}{look}</head>{start}{held}\n{inner}\n</body>{end}"


def _file(name: str) -> str:
    return (STATIC.parent / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
