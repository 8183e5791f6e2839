"""Which records of a run count."""

import msgspec
import pytest

from buckeye.monitor.metrics import MetricsLog, latest_by_step, read_metrics


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(attempt, steps)` appends a trainer's records."""

    def append(attempt, steps):
        monkeypatch.setenv("BUCKEYE_ATTEMPT", str(attempt))
        log = MetricsLog(tmp_path / "metrics.jsonl")
        for step in steps:
            log.write("trainer", step, {"by": attempt})
        log.close()

    return append


def counted(tmp_path):
    return {
        step: record["by"] for step, record in latest_by_step(tmp_path / "metrics.jsonl", "trainer").items()
    }


def test_a_step_done_again_counts_once_and_what_an_earlier_attempt_did_after_it_not_at_all(write, tmp_path):
    write(1, range(5))
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    write(2, [2])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 2}
    write(2, [3, 4, 5])
    write(3, [5, 6])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 6: 3}


def test_records_of_other_processes_change_nothing(write, tmp_path):
    write(1, range(3))
    MetricsLog(tmp_path / "metrics.jsonl").write("eval", 0, {})
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 1}


def test_the_clock_does_not_matter(write, tmp_path, monkeypatch):
    write(1, range(4))
    monkeypatch.setattr("buckeye.monitor.metrics.time.time", lambda: 12.0)  # set back to 1970
    write(2, [2])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 2}


def test_a_line_that_is_no_record_is_left_out(write, tmp_path):
    write(1, range(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('7\n[]\n"torn\nnull\n')  # what a torn line may end with can be JSON by itself
    write(1, [2])
    assert counted(tmp_path) == {0: 1, 1: 1, 2: 1}


def test_a_text_may_hold_any_line_separator(tmp_path):
    texts = ["next\x85line", "line\u2028separator", "form\x0cfeed"]
    path = tmp_path / "step_0.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"text": [text]}) + b"\n" for text in texts))
    assert [record["text"] for record in read_metrics(path)] == [[text] for text in texts]
