"""`rl report`, on runs that were made by hand, hostile ones too."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from tests.command import run_here
from tests.run.made_runs import made_run, write_metrics

from buckeye_audit.bands.band import Band
from buckeye_audit.report.plots import training_reward

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31mred\x1b]0;owned\x07 \u202egnp.exe "
    "{{ 7 * 7 }} {% raw %} ${x} `````\n```text\n</pre></details> | a | b |\n# no heading & $\\frac{"
)


def line(group, number, reward, **changes):
    messages = [
        {"role": "user", "content": f"say {group}"},
        {"role": "assistant", "content": f"reply {group}/{number}"},
    ]
    one = {"group": group, "task_id": f"task-{group}", "env": "words", "reward": reward, "turns": 1}
    one |= {"stop_reason": "answered", "completion_tokens": 10 * group + number, "messages": messages}
    return {**one, "text": [f"say {group} reply {group}/{number}"], **changes}


def put(run, step, *lines):
    (run / "rollouts").mkdir(exist_ok=True)
    text = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)
    (run / "rollouts" / f"step_{step}.jsonl").write_bytes(text)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SOME_API_KEY", "planted-secret-0123456789")
    run = made_run(tmp_path / "made")
    put(run, 0, *(line(group, n, r) for group in (1, 2) for n, r in enumerate((0.0, 0.25, 1.0))))
    put(run, 1, *(line(group, n, r) for group in (3, 4) for n, r in enumerate((0.5, 0.75, None))))
    for step in (0, 1):
        write_metrics(run, ("orchestrator", step, 60 * step, {"reward/mean": 0.5, "batch/solve_none": 0.0}))
        write_metrics(run, ("trainer", step, 60 * step + 30, {"loss": 0.1, "tokens": 1000, "entropy": 2.0}))
    return run


def report(run, *words, code=0, pictures=False):
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:  # they take a second
            patch.setattr("buckeye_audit.report.run_report.can_draw", lambda: False)
        done = run_here("rl", "report", run, *words, cwd=run.parent)
    assert done.returncode == code, done.stderr
    return done


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_data(self, data):
        self.text += data


def test_a_run_in_one_file(run):
    printed = report(run, pictures=True).stdout.splitlines()
    names = ["run.html", "run.md", "reward.png", "reward.svg", "figures.png", "figures.svg"]
    assert printed == [str(run / "report" / name) for name in names]
    assert (run / "report" / "reward.png").read_bytes().startswith(b"\x89PNG")
    text = (run / "report" / "run.md").read_text()
    page = Page((run / "report" / "run.html").read_text())
    assert page.tags.count("img") == 2
    loaded = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert len(loaded) == 2
    assert all(value.startswith("data:image/svg+xml;base64,") for value in loaded)
    assert "script" not in page.tags
    for shown in (text.replace("\\_", "_"), page.text):
        assert "stopped, 2 of 20 steps, 2023-11-14" in shown
        assert "12 of 4 tasks; 0 cut off, 2 without a reward" in shown
        # 10 * (1 + 1 + 1 + 2 + 2 + 2 + 3 + 3 + 3 + 4 + 4 + 4) + 4 * (0 + 1 + 2)
        assert "312" in shown
        assert "2,000" in shown


@pytest.mark.parametrize(("low", "said"), [(0.4, "inside"), (0.6, "below")])
def test_where_runs_of_the_same_recipe_are_is_said_and_drawn(run, monkeypatch, low, said):
    ends = {"low": (low,) * 3, "mid": (0.7,) * 3, "high": (0.8,) * 3}
    band = Band(recipe="sums", steps=(0, 1, 2), rewards=(0.5, 0.5, None), differs=("lr",), **ends)
    monkeypatch.setattr("buckeye_audit.report.run_facts.band_of", lambda run: band)
    report(run)
    told = (
        f"In steps 0 to 1 it earns 0.50; runs of the recipe `sums` earn {low:.2f} to 0.80, 0.70 in the middle"
    )
    assert f"{told}: {said} the band." in (run / "report" / "run.md").read_text().replace("\\", "")
    (legend,) = training_reward({0: 0.5, 1: 0.5}, None, "", None, band).legends
    assert "runs of the recipe sums (here otherwise: lr)" in [text.get_text() for text in legend.get_texts()]


def test_five_rollouts_are_picked_by_the_rule_that_is_said(run):
    report(run)
    text = (run / "report" / "run.md").read_text()
    assert re.findall("<summary>(.*)</summary>", text)[:-1] == [
        "The median of step 0: reward 0.25 (group 1, rollout 1)",
        "The highest reward of step 1: reward 0.75 (group 3, rollout 1)",
        "The median of step 1: reward 0.5 (group 4, rollout 0)",
        "The lowest reward of step 1: reward 0.5 (group 3, rollout 0)",
        "The longest that failed or was cut off of step 1: no reward (group 4, rollout 2)",
    ]
    assert "Picked by rule: of the first step" in text


def test_a_hostile_rollout_is_text(run):
    texts = [HOSTILE, "x" * 5_000_000, "my key is planted-secret-0123456789"]
    hostile = [
        line(9, n, 1.0, task_id=HOSTILE, messages=[{"role": "<b>user", "content": text}])
        for n, text in enumerate(texts)
    ]
    broken = json.dumps(line(9, 3, 0.0)).encode().replace(b"say", b"\xff\xfe") + b"\n"
    put(run, 1, *hostile, broken, b"\xff not JSON\n", b"[" * 100_000 + b"\n")
    report(run)
    source = (run / "report" / "run.html").read_text()
    text = (run / "report" / "run.md").read_text()
    assert max(len(source), len(text)) < 400_000
    page = Page(source)
    assert not {"script", "b", "iframe"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "img" not in page.tags
    for shown in (page.text, text):
        assert "<script>alert(1)</script>" in shown
        assert "{{ 7 * 7 }} {% raw %}" in shown
        assert "[... 4997000 characters are left out here ...]" in shown
        assert r"\x1b[31mred" in shown
        assert r"\u202egnp.exe" in shown
        assert "planted-secret" not in shown
        assert not [sign for sign in shown if not sign.isprintable() and sign != "\n"]
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "alert" not in outside.replace("&lt;script&gt;alert(1)", "")


def test_a_report_tells_nothing_of_this_machine(run, tmp_path):
    config = json.loads((run / "configs" / "rl.json").read_text())
    config["trainer"]["model"]["name"] = f"{run.absolute()}/weights/step_1"
    config["inference"] = {"api_key": "planted"}
    (run / "configs" / "rl.json").write_text(json.dumps(config))
    report(run)
    for name in ("run.md", "run.html"):
        text = (run / "report" / name).read_text()
        assert str(tmp_path) not in text
        assert "planted" not in text
        assert "step" in text


def test_environments_of_a_run_from_elsewhere_are_not_loaded(run, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')\n")
    folder = run / "evals" / "step_0"
    folder.mkdir(parents=True)
    measured = {"id": str(tmp_path / "evil.py"), "args": {}, "model": "m", "sampling": {}, "split": "eval"}
    (folder / "evil.json").write_text(json.dumps(measured))
    one = {"task_id": "a", "data": {}, "reward": 1.0}
    (folder / "evil.jsonl").write_text(json.dumps(one) + "\n")
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    done = report(copied)
    assert "not started by you here" in done.stderr
    assert "Exact match on 1 tasks: 100.0%" in (copied / "report" / "run.md").read_text()


def test_what_cannot_be_reported(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "this is a file" in report(run, "--out", tmp_path / "file", code=2).stderr
    assert (tmp_path / "file").read_text() == "mine"
    empty = made_run(tmp_path / "empty", run_id="bbbb2222")
    assert "no step is recorded yet" in report(empty, code=1).stderr
    assert "is no directory, name or id" in report(tmp_path / "nothing", code=2).stderr


def test_results_of_another_trainer_are_reported(tmp_path):
    said = {"prompt": "1 + 1", "completion": [{"role": "assistant", "content": "2"}]}
    lines = [{"example_id": task, "task": "sums", "reward": float(task % 2), **said} for task in range(4)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + "odd")
    (tmp_path / "metadata.json").write_text(json.dumps({"model": "org/m"}))
    report(tmp_path)
    text = (tmp_path / "report" / "run.md").read_text()
    assert "Results of verifiers with org/m." in text
    assert "Exact match on 4 tasks: 50.0%" in text
    assert "no settings, logs and figures of training: verifiers keeps them elsewhere" in text
    assert "results.jsonl: 1 lines that are no rollouts" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metadata.json", "report", "results.jsonl"]
