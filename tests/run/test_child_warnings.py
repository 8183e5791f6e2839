"""Log lines of the processes that the launcher shows on the console."""

from buckeye.launch.child_warnings import ChildWarnings


def line(process, level, text):
    return f"2026-01-02 03:04:05,678 [{process}] {level:>7} {text}\n"


def test_first_warning_of_each_kind_is_shown_and_repeats_are_counted(tmp_path, wording):
    log = tmp_path / "run.log"
    log.write_text(line("trainer", "WARNING", "of an attempt before"))
    warnings = ChildWarnings(log, own_process="rl")
    assert warnings.read_new() == []
    written = [
        line("orchestrator", "INFO", "Step 3 | Reward: 0.5"),
        line(
            "orchestrator",
            "WARNING",
            "Step 3: groups dropped: 2 errored; rollouts errored: 2; last error: [Errno 2]",
        ),
        "a second line of that message\n",
        line("rl", "WARNING", "Terminating all processes"),
        line(
            "orchestrator",
            "WARNING",
            "Step 14: groups dropped: 12 errored; rollouts errored: 12; last error: no tool",
        ),
        line("trainer", "WARNING", "Step 14 skipped, weights unchanged: loss nan, gradient norm 3"),
        line("trainer rank 1", "ERROR", "It broke"),
        line("trainer rank 2", "ERROR", "It broke"),
    ]
    with log.open("a") as file:
        file.write("".join(written) + "2026-01-02 03:04:06,000 [trainer] WARN")
    assert warnings.read_new() == wording
    assert warnings.suppressed_count == 2
    with log.open("a") as file:
        file.write("ING Not whole before\n")
    assert warnings.read_new() == wording


def test_repeated_warning_is_shown_again_after_ten_minutes(tmp_path, monkeypatch):
    log, clock = tmp_path / "run.log", [0.0]
    monkeypatch.setattr("buckeye.launch.progress.time.monotonic", lambda: clock[0])
    warnings = ChildWarnings(log, own_process="rl")
    shown = []
    for minute in range(25):
        clock[0] = 60.0 * minute
        with log.open("a") as file:
            file.write(line("trainer", "WARNING", f"step {minute}"))
        shown += warnings.read_new()
    assert shown == [f"03:04:05 WARNING trainer: step {n}" for n in (0, 10, 20)]
    assert warnings.suppressed_count == 22


def test_warnings_escape_control_characters_and_survive_a_replaced_log(tmp_path, wording):
    log = tmp_path / "run.log"
    warnings = ChildWarnings(log, own_process="rl")
    log.write_bytes(line("trainer", "ERROR", "red \x1b[31m" + 900 * "x").encode() + b"\xff\xfe\n")
    (shown,) = warnings.read_new()
    assert shown == wording
    assert len(shown) < 540
    log.write_text("")
    assert warnings.read_new() == []
    log.write_text(line("trainer", "WARNING", "after"))
    assert warnings.read_new() == wording
    log.unlink()
    log.mkdir()
    assert warnings.read_new() == []


def test_every_sample_is_shown(tmp_path):
    log = tmp_path / "run.log"
    warnings = ChildWarnings(log, own_process="rl")
    log.write_text(3 * line("orchestrator", "SAMPLE", "e: reward 1.000 for 'a' -> 'b'"))
    assert warnings.read_new() == 3 * ["03:04:05  SAMPLE orchestrator: e: reward 1.000 for 'a' -> 'b'"]
    assert warnings.suppressed_count == 0
