"""Records of a run that count, and records that belong together."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.json_lines import LineFile, read_json_lines
from buckeye.monitor.metrics import MetricsLog, MetricsTail, RunMetrics, StepMetrics, read_run_metrics


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return `write(attempt, steps)`, which appends a trainer's records."""

    def append(attempt, steps):
        monkeypatch.setenv("BUCKEYE_ATTEMPT", str(attempt))
        log = MetricsLog(tmp_path / "metrics.jsonl")
        for step in steps:
            log.write("trainer", step, {"by": attempt})
        log.close()

    return append


def counted(tmp_path):
    return {
        step: record["by"]
        for step, record in read_run_metrics(tmp_path / "metrics.jsonl").of("trainer").items()
    }


def test_a_step_done_again_counts_once_and_what_an_earlier_attempt_did_after_it_not_at_all(write, tmp_path):
    write(1, range(5))
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    write(2, [2])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 2}
    write(2, [3, 4, 5])
    write(3, [5, 6])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 6: 3}


def test_the_clock_does_not_matter(write, tmp_path, monkeypatch):
    write(1, range(4))
    monkeypatch.setattr("buckeye.monitor.metrics.time.time", lambda: 12.0)  # set back to 1970
    write(2, [2])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 2}


def test_a_line_that_is_no_record_is_left_out(write, tmp_path):
    write(1, range(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('7\n[]\n"torn\nnull\n')  # the end of a truncated line can be valid JSON
        file.write('{"process": "trainer"}\n{"process": 1, "step": 1}\n{"process": "trainer", "step": "1"}\n')
        file.write("[" * 100_000 + "\n")
    write(1, [2])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 1}


def test_a_text_may_hold_any_line_separator(tmp_path):
    texts = ["next\x85line", "line\u2028separator", "form\x0cfeed"]
    path = tmp_path / "step_0.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"text": [text]}) + b"\n" for text in texts))
    assert [record["text"] for record in read_json_lines(path)] == [[text] for text in texts]


def record(process, step, attempt=1, **values):
    return {"process": process, "step": step, "attempt": attempt, **values}


def test_records_are_joined_by_step_however_far_the_processes_are_apart():
    metrics = RunMetrics(
        [
            *(record("orchestrator", n, **{"reward/mean": n / 8}) for n in range(4)),
            *(record("trainer", n, loss=-n) for n in range(2)),
        ]
    )
    seen = [(s.number, s.reward, s.value("loss"), s.trained is not None) for s in metrics.steps()]
    assert seen == [
        (0, 0.0, 0.0, True),
        (1, 0.125, -1.0, True),
        (2, 0.25, None, False),
        (3, 0.375, None, False),
    ]
    assert metrics.values("reward/mean") == {0: 0.0, 1: 0.125, 2: 0.25, 3: 0.375}


def test_a_record_of_no_attempt_is_of_the_first():
    old = [{"process": "trainer", "step": step} for step in range(3)]
    assert list(RunMetrics([*old, record("trainer", 1, 2)]).of("trainer")) == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time/total", 1.0),
        ("orchestrator/time/total", 2.0),
        ("eval/letters/avg@2", 0.5),
        ("loss", None),
        ("words", None),
        ("huge", None),
        ("nobody/time/total", None),
    ],
)
def test_a_number_by_its_name(name, value):
    trainer = record("trainer", 0, loss=float("nan"), words="no number", huge=10**400, **{"time/total": 1})
    others = {
        "orchestrator": record("orchestrator", 0, **{"time/total": 2}),
        "eval": record("eval", 0, **{"eval/letters/avg@2": 0.5}),
    }
    assert StepMetrics(0, {"trainer": trainer, **others}).value(name) == value


def test_a_step_is_taken_once_when_it_is_whole_or_a_later_one_is_trained():
    metrics = RunMetrics([record("orchestrator", n) for n in range(4)])
    assert metrics.take() == []

    def taken(*records, rest=False):
        for new in records:
            metrics.add(new)
        return [(step.number, sorted(step.records)) for step in metrics.take(rest=rest)]

    assert taken(record("trainer", 0)) == [(0, ["orchestrator", "trainer"])]
    assert taken(record("trainer", 4)) == [(n, ["orchestrator"]) for n in (1, 2, 3)]
    assert taken() == []
    assert taken(record("orchestrator", 4)) == [(4, ["orchestrator", "trainer"])]
    assert taken(record("trainer", 5), record("eval", 6)) == []
    assert taken(record("trainer", 5, 2), record("orchestrator", 5, 2)) == [(5, ["orchestrator", "trainer"])]
    assert taken(record("trainer", 6, 2), rest=True) == [(6, ["trainer"])]


@st.composite
def runs(draw):
    """Draw the lines of a run by attempt, as three processes may write them.

    Each is (attempt, process, step), or None for a truncated line of a killed process. A batch is recorded
    before the next one is trained, but perhaps after its own training, or never if the orchestrator is
    killed.
    """
    lines, reached = [], 0
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        first = draw(st.integers(0, reached))
        collected = draw(st.integers(0, 5))
        trained = draw(st.integers(0, collected + 1))
        versions = sorted(draw(st.sets(st.integers(first, first + trained), max_size=3)))
        left = {
            "orchestrator": list(range(first, first + collected)),
            "trainer": list(range(first, first + trained)),
            "eval": versions,
        }
        while any(left.values()):
            ready = [name for name, steps in left.items() if steps]
            if left["orchestrator"] and left["trainer"] and left["orchestrator"][0] < left["trainer"][0]:
                ready.remove("trainer")
            process = draw(st.sampled_from(ready))
            lines.append((attempt, process, left[process].pop(0)))
        if draw(st.booleans()):
            lines.append(None)
        reached = first + trained
    return lines


def written(line):
    attempt, process, step = line
    name = "reward/mean" if process == "orchestrator" else "loss"
    return record(process, step, attempt, **{name: attempt + step / 100})


def counted_by_hand(lines):
    """Return the attempt whose record counts for each (step, process), computed attempt by attempt."""
    counts = {}
    for attempt in range(1, 5):
        own = [line for line in lines if line is not None and line[0] == attempt]
        first = min((step for _, process, step in own if process != "eval"), default=None)
        if first is not None:
            counts = {
                (step, process): by
                for (step, process), by in counts.items()
                if step < first or (process == "eval" and step == first)
            }
        counts |= {(step, process): attempt for _, process, step in own}
    return counts


@given(lines=runs(), data=st.data())
def test_whatever_the_order_the_records_of_the_last_line_of_training_count(lines, data):
    records = [written(line) for line in lines if line is not None]
    expected = counted_by_hand(lines)
    for order in (records, data.draw(st.permutations(records))):
        steps = RunMetrics(order).steps()
        counts = {(s.number, name): r["attempt"] for s in steps for name, r in s.records.items()}
        assert counts == expected


@given(lines=runs(), data=st.data())
def test_a_file_that_is_read_while_it_grows_says_the_same_as_the_whole(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    file, tail, growing = LineFile(path), MetricsTail(path), RunMetrics()
    for line in lines:
        text = json.dumps(written(line)).encode() + b"\n" if line is not None else b'{"process": "tra'
        if line is None:
            with path.open("ab") as torn:
                torn.write(text)
        else:
            file.append(text)
        if data.draw(st.booleans()):
            for new in tail.read_new():
                growing.add(new)
    file.close()
    for new in tail.read_new():
        growing.add(new)
    assert growing.steps() == read_run_metrics(path).steps()


def test_a_tail_gives_whole_records_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    one, two, three = (record("trainer", step) for step in range(3))
    tail = MetricsTail(path, 0)
    assert tail.read_new() == []
    path.write_text(f'{json.dumps(one)}\n{{"tor\n{{"a": 1}}\n{json.dumps(two)}\n{json.dumps(three)[:20]}')
    assert tail.read_new() == [one, two]
    with path.open("a") as file:
        file.write(json.dumps(three)[20:] + "\n")
    assert MetricsTail(path, tail.position).read_new() == [three]
    assert tail.read_new() == [three]
    assert MetricsTail(path).read_new() == []


def test_what_was_played_counts_where_a_filter_chooses_the_batch():
    metrics = RunMetrics()
    for step, values in enumerate([{"reward/mean": 0.5, "reward/played": 0.2}, {"reward/mean": 0.5}, {}]):
        metrics.add({"process": "orchestrator", "step": step, **values})
    assert [(step.reward, step.sampled_reward) for step in metrics.steps()] == [
        (0.5, 0.2),
        (0.5, 0.5),
        (None, None),
    ]
