"""`rl watch`: a run in a terminal, also over ssh. Textual is imported only here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Header, Label, Sparkline, Static, TabbedContent, TabPane

from buckeye.base.json_lines import printable
from buckeye.errors import BuckeyeError
from buckeye.launch.waits import sentence
from buckeye.monitor.metrics import Step
from buckeye.monitor.rollouts import rollout_steps, whole_rollout
from buckeye.runs.status import RunStatus, run_status
from buckeye_ui.findings import findings_of
from buckeye_ui.sources import OpenRun

_SECONDS = 5.0
_LONGEST = 6000
_MOST_ROWS = 500
_CURVES = (
    ("reward", "orchestrator/reward/mean"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("sampler against trainer, KL", "mismatch_kl"),
    ("groups all solved", "batch/solve_all"),
    ("groups none solved", "batch/solve_none"),
    ("reply length", "completion_len/mean"),
    ("cut off", "is_truncated/mean"),
    ("tokens a second", "tokens_per_second"),
)
_PLAYED = (
    "SELECT grp, number, task, reward, truncated, completion_tokens, stop_reason, error, dropped "
    "FROM rollouts WHERE split = 'train' AND step = ? AND retried = 0 "
    "ORDER BY dropped IS NOT NULL, grp, number LIMIT ?"
)


class Watch(App[None]):
    """Overview, findings, curves and rollouts of a run, read again every few seconds."""

    CSS = """
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; }
    TabPane { padding: 1 2 0 2; }
    Sparkline { height: 3; margin-bottom: 1; }
    DataTable { height: 1fr; }
    #text { height: 1fr; border-top: solid $primary; }
    #state, #found, #said { width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("1", "show('overview')", "Overview"),
        ("2", "show('findings')", "Findings"),
        ("3", "show('curves')", "Curves"),
        ("4", "show('rollouts')", "Rollouts"),
        ("left_square_bracket", "step(-1)", "Step before"),
        ("right_square_bracket", "step(1)", "Step after"),
    ]

    def __init__(self, run: OpenRun) -> None:
        super().__init__()
        self._run_shown = run
        self._step: int | None = None
        """Whose rollouts are shown; None for the newest."""
        self.title = printable(run.name)

    def compose(self) -> ComposeResult:
        yield Header()
        with TabbedContent(initial="overview"):
            with TabPane("Overview", id="overview"), VerticalScroll():
                yield Static("", id="state", markup=False)
            with TabPane("Findings", id="findings"), VerticalScroll():
                yield Static("`rl diagnose` looks at the run ...", id="found", markup=False)
            with TabPane("Curves", id="curves"), VerticalScroll():
                for number, (name, _) in enumerate(_CURVES):
                    yield Label(name, id=f"name{number}", markup=False)
                    yield Sparkline([], id=f"curve{number}")
            with TabPane("Rollouts", id="rollouts"):
                yield DataTable(cursor_type="row")
                with VerticalScroll(id="text"):
                    yield Static("Enter shows the text of a rollout.", id="said", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._read()
        self._diagnose()
        self.set_interval(_SECONDS, partial(self._unless_at_work, "read", self._read))
        self.set_interval(6 * _SECONDS, partial(self._unless_at_work, "diagnose", self._diagnose))

    def _unless_at_work(self, group: str, start: Callable[[], object]) -> None:
        """On a busy machine the next look is due before the last one has ended."""
        if all(worker.is_finished for worker in self.workers if worker.group == group):
            start()

    def action_show(self, tab: str) -> None:
        self.query_one(TabbedContent).active = tab
        if tab == "rollouts":
            self.query_one(DataTable).focus()

    def action_step(self, by: int) -> None:
        steps = rollout_steps(self._run_shown.path)
        if steps:
            now = steps[-1] if self._step not in steps else self._step
            self._step = steps[max(0, min(len(steps) - 1, steps.index(now) + by))]
            self._read()

    @work(thread=True, exclusive=True, group="read")
    def _read(self) -> None:
        steps = self._run_shown.steps
        try:
            state = "\n".join(_state_lines(run_status(self._run_shown.path, measure_disk=False)))
        except BuckeyeError as error:  # a copy without its record
            state = str(error)
        played = rollout_steps(self._run_shown.path)
        step = self._step if self._step in played else (played[-1] if played else None)
        with self._run_shown.read() as run:
            rows = run.query(_PLAYED, step, _MOST_ROWS) if step is not None else []
        with suppress(NoMatches):  # it is being closed
            self.call_from_thread(self._show, state, steps, step, rows)

    def _show(self, state: str, steps: Sequence[Step], step: int | None, rows: Sequence[Any]) -> None:
        self.query_one("#state", Static).update(printable(state))
        for number, (name, metric) in enumerate(_CURVES):
            values = [value for one in steps if (value := one.value(metric)) is not None]
            self.query_one(f"#curve{number}", Sparkline).data = values
            told = (
                f"{name}: {values[0]:.4g} at first, {values[-1]:.4g} at last" if values else f"{name}: none"
            )
            self.query_one(f"#name{number}", Label).update(told)
        self.sub_title = "no rollouts yet" if step is None else f"rollouts of step {step}"
        self._show_rollouts(step, rows)

    def _show_rollouts(self, step: int | None, rows: Sequence[Any]) -> None:
        table = self.query_one(DataTable)
        keys = [f"{step} {row[0]} {row[1]}" for row in rows]
        if keys == [str(key.value) for key in table.rows]:
            return
        table.clear(columns=True)
        table.add_columns("group", "rollout", "task", "reward", "tokens", "ended by", "dropped")
        for key, (group, number, task, reward, cut, tokens, reason, error, dropped) in zip(
            keys, rows, strict=True
        ):
            ended = error or f"{reason}{', cut off' if cut else ''}"
            cells = (
                group,
                number,
                task,
                "none" if reward is None else f"{reward:.4g}",
                tokens,
                ended,
                dropped,
            )
            table.add_row(*(_cell(cell) for cell in cells), key=key)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        step, group, number = (int(part) for part in str(event.row_key.value).split())
        with self._run_shown.read() as run:
            rollout = run.text_of(step, group, number)
        lines = ["its text was deleted"] if rollout is None else whole_rollout(rollout, _LONGEST)
        self.query_one("#said", Static).update("\n".join(lines))
        self.query_one("#text", VerticalScroll).scroll_home(animate=False)

    @work(thread=True, exclusive=True, group="diagnose")
    def _diagnose(self) -> None:
        told = findings_of(self._run_shown)
        lines = [
            f"{one['name']} ({one['confidence']}): {one['seen']}\n  because  {one['cause']}\n"
            f"  do       {one['advice']}"
            for one in told["findings"]
        ]
        text = told.get("missing") or "\n\n".join(lines) or "`rl diagnose` finds nothing wrong."
        with suppress(NoMatches):  # it is being closed
            self.call_from_thread(self.query_one("#found", Static).update, printable(str(text)))


def _cell(value: Any) -> Text:
    """One line without markup of its own."""
    line = printable(" ".join(str("" if value is None else value).split()))
    return Text(line if len(line) <= 40 else f"{line[:39]}…")


def _state_lines(status: RunStatus) -> Iterator[str]:
    of = "" if status.max_steps is None else f" of {status.max_steps}"
    yield f"{status.state}, step {status.step}{of}, attempt {status.attempt}, {status.restarts} restarts"
    if status.reward_mean is not None:
        change = "" if status.reward_change is None else f" ({status.reward_change:+.4f})"
        yield f"reward {status.reward_mean:.4f}{change}, mean of the last steps"
    if status.tokens_per_second is not None:
        yield f"{status.tokens_per_second:.0f} tokens a second"
    if status.seconds_left is not None:
        done = time.localtime(time.time() + status.seconds_left)
        yield f"done about {time.strftime('%Y-%m-%d %H:%M', done)}"
    yield from ("", *(f"{one.title}: {one.state}" for one in status.processes))
    yield from (sentence(wait, time.time()) for wait in status.waits)
    for name, text in (("ended because", status.reason), ("last error", status.last_error)):
        if text:
            yield f"{name}: {text}"
