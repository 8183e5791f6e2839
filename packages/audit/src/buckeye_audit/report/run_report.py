"""The report of a run: its blocks, and the files that are made of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from buckeye.base.storage import write_file
from buckeye.errors import BuckeyeError
from buckeye.monitor.conversation import Message, conversation
from buckeye.monitor.redact import redacted
from buckeye.monitor.rollouts import PlayedRollout, shortened
from buckeye_audit.exchange.played import left_out
from buckeye_audit.report.document import (
    Block,
    Bullets,
    Folded,
    Heading,
    Picture,
    Table,
    Text,
    to_html,
    to_markdown,
)
from buckeye_audit.report.files import can_draw, draw
from buckeye_audit.report.plots import rendered, small_panels, training_reward
from buckeye_audit.report.run_facts import PICKED, RunFacts
from buckeye_audit.report.text import exact_cells, overview, summary

_LONGEST = 3000
"""Characters of a message that are shown."""
_MOST_MESSAGES = 40


def write_run_report(facts: RunFacts, directory: Path) -> list[Path]:
    """Write `run.md`, `run.html` and the pictures (if matplotlib is installed) into a directory, and return
    their paths. Raises BuckeyeError for a run of which nothing is recorded."""
    if not facts.run.steps and not facts.evaluations:
        raise BuckeyeError(f"{facts.run.path}: no step is recorded yet")
    figures = _figures(facts) if can_draw() else {}
    pictures, paths = [], []
    for name, (text, figure) in figures.items():
        svg = rendered(figure, "svg")
        for kind, data in (("png", rendered(figure, "png")), ("svg", svg)):
            paths.append(directory / f"{name}.{kind}")
            write_file(paths[-1], data)
        pictures.append(Picture(text, f"{name}.png", svg))
    blocks = list(_blocks(facts, pictures))
    for name, write in (("run.md", to_markdown), ("run.html", to_html)):
        write_file(directory / name, write(facts.name, blocks))
    return [directory / "run.html", directory / "run.md", *paths]


def _figures(facts: RunFacts) -> dict[str, tuple[str, Any]]:
    """File name without its ending -> what it shows, and the figure."""
    found = {}
    several = len(facts.evaluations) > 1
    for number, report in enumerate(facts.evaluations, 1):
        for name, drawn in draw(report).items():
            if name != "training":
                found[f"{name}_{number}" if several else name] = drawn
    if facts.rewards:
        title = f"{facts.name}: reward while training"
        floors = {report.training.floor for report in facts.evaluations if report.training is not None}
        floor = floors.pop() if len(floors) == 1 else None
        means = {step: estimate.value for step, estimate in facts.rewards.items()}
        found["reward"] = (title, training_reward(means, floor, title, facts.rewards, facts.band))
    if facts.panels:
        title = f"{facts.name}: figures of the steps"
        found["figures"] = (title, small_panels(facts.panels, title))
    return found


def _blocks(facts: RunFacts, pictures: list[Picture]) -> Iterator[Block]:
    """The whole report, what matters most first."""
    yield Text(_state(facts))
    yield Heading("Findings")
    found = [
        f"{one.name} ({one.confidence}): {one.seen}, because {one.cause}. To do: {one.advice}."
        for one in facts.findings
    ]
    if found:
        yield Bullets([facts.public(text) for text in found])
    else:
        yield Text("`rl diagnose` finds nothing wrong, as far as the records tell.")
    if facts.band is not None:
        yield Text(f"{facts.band.told}: {'inside' if facts.band.inside else 'below'} the band.")
    for report in facts.evaluations:
        yield Heading(f"Held-out tasks of {report.name}")
        yield Bullets(summary(report))
        header, *rows = exact_cells(overview(report))
        yield Table(header, rows)
        if report.warnings:
            yield Bullets(report.warnings)
    if facts.evaluations:
        yield Text(
            "Shares are means over tasks in per cent, with 95 % intervals over clusters of related tasks; "
            "changes are in points, of tasks scored both times. No content is the best policy that never "
            "looks at what is asked."
        )
    if pictures:
        yield Heading("Curves")
        yield from pictures
    if facts.picked:
        yield Heading("Rollouts")
        yield Text(PICKED)
        for why, step, rollout in facts.picked:
            yield _rollout(why, step, rollout)
    for title, rows_of in (
        ("Settings", facts.settings),
        ("Cost", facts.cost),
        ("Versions and hashes", facts.provenance),
    ):
        if rows_of:
            yield Heading(title)
            yield Table(("", ""), list(rows_of.items()), figures=False)
    if facts.kind_and_config[1]:
        yield Folded("All settings", [("without secrets", facts.config_text)])
    notes = [*left_out(facts.run), *facts.notes]
    if notes:
        yield Heading("What is missing here")
        yield Bullets([facts.public(note) for note in notes])


def _state(facts: RunFacts) -> str:
    record = facts.record
    if facts.foreign is not None:
        return f"Results of {facts.foreign.kind} with {facts.foreign.model}."
    done = max((step.number + 1 for step in facts.run.steps if step.trained is not None), default=0)
    model = facts.settings.get("Model", "a model that is not recorded")
    kind = {"rl": "Reinforcement learning", "sft": "Supervised fine-tuning"}.get(
        facts.kind_and_config[0], "A run"
    )
    if record is None:
        return f"{kind} of {model}, {done} steps."
    day = time.strftime("%Y-%m-%d", time.gmtime(record.started))
    of = f" of {record.max_steps}" if record.max_steps is not None else ""
    attempts = f", {record.attempt} attempts" if record.attempt > 1 else ""
    told = f"{kind} of {model}: {record.actual_state()}, {done}{of} steps{attempts}, {day}."
    reason = record.actual_reason()
    return f"{told} It ended so: {facts.public(reason)}." if reason else told


def _rollout(why: str, step: int, rollout: PlayedRollout) -> Folded:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    ended = f"{rollout.stop_reason}{', cut off' if rollout.truncated else ''}"
    values = {
        "task": rollout.task_id,
        "environment": rollout.env,
        "components": json.dumps(rollout.components, ensure_ascii=False) if rollout.components else "",
        **rollout.explanations,
        "ended by": ended,
        "error": rollout.error or "",
        "dropped": rollout.dropped or "",
        "sampled": f"{rollout.completion_tokens} tokens in {rollout.turns} turns",
    }
    facts = "\n".join(f"{name}: {shortened(str(value), _LONGEST)}" for name, value in values.items() if value)
    said = conversation(rollout)
    parts = [(message.role, _shown(message)) for message in said[:_MOST_MESSAGES]]
    if len(said) > len(parts):
        parts.append(("", f"[... {len(said) - len(parts)} more messages are left out here ...]"))
    head = f"{why}: {reward} (group {rollout.group}, rollout {rollout.number})"
    return Folded(head[0].upper() + head[1:], redacted([("facts", facts), *parts]))


def _shown(message: Message) -> str:
    thought = [f"[thinks] {message.reasoning}"] if message.reasoning else []
    calls = [f"[calls] {call.name} {call.arguments}" for call in message.calls]
    return shortened("\n".join([*thought, *([message.text] if message.text else []), *calls]), _LONGEST)
