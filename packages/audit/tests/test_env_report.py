"""`buckeye env report`, from the files of evaluations that are written by hand here."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from tests.command import run_here

from buckeye.errors import UsageError
from buckeye.run_files.directory import RUN_FILE, clean, files_of_a_run
from buckeye_audit.report.files import write_report
from buckeye_audit.report.gather import ReportRequest, make_report

ENVIRONMENT = '''
"""Words to say. In the family `fixed` the answer is always the same, so that no content is needed."""

from buckeye.envs.base import Outcome, Task

FAMILIES = ("free", "fixed")


class Words:
    name = "words"
    splits = ("train", "near", "far")
    content_hash = "abc123"

    def __init__(self, loud):
        self.loud = loud

    def tasks(self, split):
        if split == "train":
            return [self._task(family, "train", i) for family in FAMILIES for i in range(100, 160)]
        if split != "eval":
            raise KeyError(split)
        return [self._task(f, s, i) for f in FAMILIES for s in ("near", "far") for i in range(20)]

    def _task(self, family, split, i):
        answer = "fix" if family == "fixed" else f"word{i * 7919 % 1000}"
        answer = answer.upper() if self.loud else answer
        prompt = {"role": "user", "content": f"{split} {family}: say number {i}"}
        lemmas = [f"{family}{split}{i // 2}"]
        data = {"family": family, "split": split, "lemma_ids": lemmas, "accept": [answer]}
        return Task(id=f"{family}-{split}-{i}", messages=(prompt,), data=data)

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        return Outcome(reward=float(reply.text == task.data["accept"][0]))


def load_environment(loud=False):
    return Words(loud)
'''


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.py").write_text(ENVIRONMENT)
    return tmp_path


def record(family, split, number, reward, rollout=0, **more):
    return {
        "task_id": f"{family}-{split}-{number}",
        "rollout": rollout,
        "data": {"family": family, "split": split, "lemma_ids": [f"{family}{split}{number // 2}"]},
        "reward": reward,
        "components": {"ortho_miss": 1.0} if reward == 0.3 else {"ortho_miss": 0.0},
        "stop_reason": "answered",
        "truncated": False,
        "error": None if reward is not None else "no such tool",
        **more,
    }


def write_evaluation(folder, records, name="words", **measured):
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "id": "words.py",
        "args": {},
        "split": "eval",
        "model": "some/model",
        "sampling": {"temperature": 0.0, "max_tokens": 32},
        **measured,
    }
    (folder / f"{name}.json").write_text(json.dumps(summary))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def everything(solved):
    """All held-out tasks, solved where `solved(family, split, number)` says so."""
    return [
        record(f, s, i, float(solved(f, s, i)))
        for f in ("free", "fixed")
        for s in ("near", "far")
        for i in range(20)
    ]


@pytest.fixture
def run(workplace):
    """Before: the fixed answers only. After: also the free ones of the near split."""
    directory = workplace / "out"
    write_evaluation(directory / "evals" / "step_0", everything(lambda f, s, i: f == "fixed"), step=0)
    write_evaluation(
        directory / "evals" / "step_5", everything(lambda f, s, i: f == "fixed" or i < 4), step=5
    )
    write_evaluation(
        directory / "evals" / "step_10", everything(lambda f, s, i: f == "fixed" or s == "near"), step=10
    )
    (directory / "configs").mkdir()
    config = {"orchestrator": {"env": [{"id": "words.py", "args": {}, "name": None}]}}
    (directory / "configs" / "rl.json").write_text(json.dumps(config))
    lines = [{"process": "orchestrator", "step": i, "reward/played": i / 10} for i in range(10)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def row(report, label):
    (found,) = [r for r in report.rows if r.label == label]
    return found


def test_rows_by_family_split_and_both(run):
    report = make_report(ReportRequest(env_id="words.py", run=run))
    assert [r.label for r in report.rows] == [
        *("all tasks", "fixed", "free", "near", "far"),
        *("fixed / near", "fixed / far", "free / near", "free / far"),
    ]
    everything = row(report, "all tasks")
    assert (everything.after.tasks, everything.clusters) == (80, 40)
    assert (everything.before.exact.value, everything.after.exact.value) == (0.5, 0.75)
    assert everything.change.value == 0.25
    assert everything.verdict == "rose"
    free = row(report, "free")
    assert (free.before.exact.value, free.after.exact.value, free.clusters) == (0.0, 0.5, 20)
    near = row(report, "free / near")
    assert (near.change.value, near.clusters, near.verdict) == (1.0, 10, "rose")
    far = row(report, "free / far")
    assert far.verdict == "unclear"
    assert far.change.low < 0 < far.change.high


def test_a_policy_without_content_stands_beside_every_row(run):
    report = make_report(ReportRequest(env_id="words.py", run=run))
    assert row(report, "fixed").content_free.exact == 1.0
    assert row(report, "fixed").above_floor is False
    assert row(report, "free / near").content_free.exact <= 0.1
    assert row(report, "free / near").above_floor is True
    assert row(report, "all tasks").content_free.exact == pytest.approx(0.5, abs=0.05)
    assert report.training.floor == pytest.approx(0.5, abs=0.05)


def test_what_is_written(run):
    report = make_report(ReportRequest(env_id="words.py", run=run))
    files = write_report(report, run / "report")
    names = [f.name for f in files]
    assert names == [
        "report.md",
        "report.json",
        "exact_match.png",
        "families.png",
        "splits.png",
        "training.png",
    ]
    text = (run / "report" / "report.md").read_text()
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (run / "report" / picture).read_bytes().startswith(b"\x89PNG")
    assert "Exact match on 80 tasks rose from 50.0% to 75.0%" in text
    assert "- Rose: free, near." in text
    assert "- Cannot be told apart from no change: fixed, far." in text
    assert "not clearly above the best policy without content: fixed" in text
    assert "| free / near | 20 | 10 | 0.0 [0.0, 27.8] | 100.0 [72.2, 100.0] | +100.0 [" in text
    assert "`abc123`" in text
    assert "greedy" in text
    figures = json.loads((run / "report" / "report.json").read_text())
    assert [point["step"] for point in figures["curve"]] == [0, 5, 10]
    assert figures["rows"][0]["after"]["exact"]["value"] == 0.75
    assert figures["after"]["model"] == "some/model"


def test_pass_at_k_spelling_errors_and_truncation(workplace):
    rollouts = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0, 0.3, 0.3], 2: [None, None, 0.0, 1.0]}
    records = [
        record("free", "near", n, reward, member, truncated=member == 3)
        for n, rewards in rollouts.items()
        for member, reward in enumerate(rewards)
    ]
    write_evaluation(workplace / "after" / "evals", records)
    report = make_report(ReportRequest(env_id="words.py", after=workplace / "after"))
    (only,) = report.rows
    side = only.after
    assert [(p.k, p.tasks) for p in side.pass_at] == [(1, 3), (2, 3), (4, 2)]
    assert [p.value for p in side.pass_at] == [
        pytest.approx((1 / 4 + 2 / 4 + 1 / 2) / 3),
        pytest.approx((1 - 3 / 6 + 1 - 1 / 6 + 1) / 3),
        1.0,
    ]
    assert side.exact.value == pytest.approx((1 / 4 + 2 / 4 + 1 / 2) / 3)
    assert side.mean_reward == pytest.approx((1 / 4 + 2.6 / 4 + 1 / 2) / 3)  # over tasks, as pass@k
    assert side.ortho_miss == pytest.approx((0 + 2 / 4 + 0) / 3)
    assert (side.truncated, side.errored, side.rollouts) == (3, 2, 12)
    assert any("2 rollouts after ended with an error" in w for w in report.warnings)
    assert any("all tasks (2)" in w for w in report.warnings)  # two clusters
    assert any("one evaluation only" in w for w in report.warnings)
    text = write_report(report, workplace / "report")[0].read_text()
    assert "| pass@k, before → after | k = 1 | k = 2 | k = 4 |" in text


def test_one_cluster_with_most_of_the_tasks_is_named(workplace):
    records = [record("free", "near", i, float(i % 2)) for i in range(40)]
    for r in records[:22]:
        r["data"]["lemma_ids"].insert(0, "the word of most of them")
    write_evaluation(workplace / "after", records)
    report = make_report(ReportRequest(env_id="words.py", after=workplace / "after"))
    assert any("most tasks in one" in w and "all tasks (10)" in w for w in report.warnings)


def test_a_task_without_any_score_is_no_failure(workplace):
    write_evaluation(workplace / "before", [record("free", "near", i, 0.0) for i in range(4)])
    write_evaluation(
        workplace / "after",
        [record("free", "near", 0, None), *(record("free", "near", i, 1.0) for i in range(1, 4))],
    )
    report = make_report(
        ReportRequest(env_id="words.py", before=workplace / "before", after=workplace / "after")
    )
    (only,) = report.rows
    assert (only.after.exact.value, only.after.exact.n, only.after.tasks) == (1.0, 3, 4)
    assert only.change.n == 3


def test_nothing_scored_at_all(workplace):
    write_evaluation(workplace / "after", [record("free", "near", i, None) for i in range(4)])
    report = make_report(ReportRequest(env_id="words.py", after=workplace / "after"))
    assert report.rows[0].after.exact is None
    text = write_report(report, workplace / "report")[0].read_text()
    assert "No rollout of the evaluation after training could be scored" in text


def test_evaluations_that_a_resumed_run_took_back_are_left_out(run):
    attempts = [{"attempt": 1, "resumed_step": None}, {"attempt": 2, "resumed_step": 5}]
    (run / RUN_FILE).write_text(json.dumps({"attempts": attempts}))
    for step in (0, 5, 10):
        file = run / "evals" / f"step_{step}" / "words.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "attempt": 1}))
    report = make_report(ReportRequest(env_id="words.py", run=run))
    assert report.after.step == 5
    assert list(report.curve) == [0, 5]
    attempts[1]["resumed_step"] = 4
    shutil.rmtree(run / "evals" / "step_0")
    (run / RUN_FILE).write_text(json.dumps({"attempts": attempts}))
    with pytest.raises(UsageError, match="took back"):
        make_report(ReportRequest(env_id="words.py", run=run))


def test_evaluations_that_cannot_be_compared_are_named(workplace):
    write_evaluation(workplace / "before", [record("free", "near", i, 0.0) for i in range(6)])
    write_evaluation(
        workplace / "after",
        [record("free", "near", i, 1.0) for i in (*range(4), 99)],
        sampling={"temperature": 1.0},
    )
    report = make_report(
        ReportRequest(env_id="words.py", before=workplace / "before", after=workplace / "after")
    )
    text = " ".join(report.warnings)
    assert "differ in `sampling`" in text
    assert "4 tasks in common, of 6 before and 5 after" in text
    assert "1 of the 5 evaluated tasks are not in the environment" in text
    assert report.rows[0].change.n == 4


def test_arguments_are_those_of_the_evaluation_unless_given(run):
    for step in (0, 5, 10):
        file = run / "evals" / f"step_{step}" / "words.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "args": {"loud": True}}))
    assert make_report(ReportRequest(env_id="words.py", run=run)).args == {"loud": True}
    given = make_report(ReportRequest(env_id="words.py", run=run, args={"loud": False}))
    assert given.args == {"loud": False}


def test_an_environment_without_families_has_one_row(workplace, run):
    for name in ("step_0", "step_10"):
        file = run / "evals" / name / "words.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**r, "data": {}}) + "\n" for r in records))
    report = make_report(ReportRequest(env_id="words.py", run=run))
    (only,) = report.rows
    assert (only.label, only.clusters) == ("all tasks", 80)
    write_report(report, workplace / "report")
    assert (workplace / "report" / "all_tasks.png").exists()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"run": "nowhere"}, "no directory nowhere"),
        ({"run": "."}, r"holds no evaluations.*\[eval\]"),
        ({"after": "."}, "holds no evaluation"),
        ({"before": "."}, "--before needs --after"),
        ({}, "give --run"),
        ({"env_id": "wrds", "run": "out"}, "but of words. Did you mean words"),
    ],
)
def test_requests_that_cannot_be_answered(workplace, run, request_, message):
    paths = {k: v if k == "env_id" else workplace / v for k, v in request_.items()}
    with pytest.raises(UsageError, match=message.replace("nowhere", str(workplace / "nowhere"))):
        make_report(ReportRequest(**{"env_id": "words.py", **paths}))


def test_two_evaluations_of_one_environment_are_told_apart_by_name(run):
    for step in (0, 10):
        write_evaluation(
            run / "evals" / f"step_{step}", everything(lambda f, s, i: False), name="loud", step=step
        )
    (run / "evals" / "step_0" / "words.json").rename(run / "evals" / "step_0" / "quiet.json")
    (run / "evals" / "step_0" / "words.jsonl").rename(run / "evals" / "step_0" / "quiet.jsonl")
    with pytest.raises(UsageError, match=r"several evaluations of words\.py: loud, quiet, words"):
        make_report(ReportRequest(env_id="words.py", run=run))
    assert make_report(ReportRequest(env_id="loud", run=run)).rows[0].after.exact.value == 0.0


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"task_id": 3, "data": {}, "reward": 1}',
        '{"task_id": "a", "data": {}}',
        '{"task_id": "a", "data": {}, "reward": NaN}',
        '{"task_id": "a", "data": {}, "reward": -Infinity}',
        '{"task_id": "a", "data": {}, "reward": 1e999}',
        f'{{"task_id": "a", "data": {{}}, "reward": {10**400}}}',
        '{"task_id": "a", "data": {}, "reward": "1"}',
    ],
)
def test_a_line_that_is_no_rollout_is_named(run, line):
    file = run / "evals" / "step_10" / "words.jsonl"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UsageError, match=r"words\.jsonl, line 81"):
        make_report(ReportRequest(env_id="words.py", run=run))


def test_clean_takes_the_evaluations_of_a_run_and_no_others(run):
    (run / RUN_FILE).write_text("{}")
    write_evaluation(run / "evals", [], name="mine")
    assert run / "evals" / "step_5" in files_of_a_run(run)
    clean(run)
    assert sorted(p.name for p in (run / "evals").iterdir()) == ["mine.json", "mine.jsonl"]


def command(*words):
    return run_here("env", "report", *words, cwd=".")


def test_the_command_prints_the_table_and_says_where_the_files_are(run):
    done = command("words.py", "--run", run)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "exact",
        "match",
        "tasks",
        "clusters",
        "before",
        "after",
        "change",
        "no",
        "content",
    ]
    assert any(re.match(r"all tasks +80 +40 +50\.0 \[.*\] +75\.0 \[.*\] +\+25\.0 \[", line) for line in lines)
    assert str(run / "report" / "report.md") in lines
    assert "\x1b" not in done.stdout


def test_the_command_as_json(run, workplace):
    words = ("--run", run, "--output", workplace / "elsewhere", "--arg", "loud=true", "--json")
    done = command("words.py", *words)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["environment"]["args"] == {"loud": True}
    assert printed == json.loads((workplace / "elsewhere" / "report.json").read_text())
    assert not (run / "report").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("words.py", "--run", "out", "--arg", "lound=1"), "Did you mean 'loud'?"),
        (("words.py", "--run", "elsewhere"), "there is no directory elsewhere"),
        (("no-such", "--run", "out"), "has no evaluation of 'no-such', but of words"),
    ],
)
def test_wrong_usage_of_the_command(run, words, message):
    done = command(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("words.py", "but words.py is a file. Name another: --output DIR"),
        ("words.py/report", "cannot be written to words.py/report: Not a directory. Name a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_wrong_usage(run, output, message):
    done = command("words.py", "--run", run, "--output", output)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_environment_without_a_train_split_has_a_report_too(workplace, run):
    only_held_out = ENVIRONMENT.replace('("train", "near", "far")', '("eval", "near", "far")').replace(
        'if split == "train"', 'if split == "nothing"'
    )
    (workplace / "words.py").write_text(only_held_out)
    report = make_report(ReportRequest(env_id="words.py", run=run))
    assert report.training.floor is None
    assert row(report, "fixed").content_free.exact == 1.0
    assert row(report, "fixed").content_free.policy == "another task's answer"


def test_a_report_needs_nothing_that_training_needs(run):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from buckeye_audit.report.files import write_report\n"
        "from buckeye_audit.report.gather import ReportRequest, make_report\n"
        "for name in ('torch', 'transformers', 'numpy', 'jinja2', 'matplotlib'): sys.modules[name] = None\n"
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "report = make_report(ReportRequest(env_id='words.py', run=Path('out')))\n"
        "print(*[path.name for path in write_report(report, Path('plain'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["report.md", "report.json"]
