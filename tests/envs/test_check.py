"""The honesty check on a toy environment: it passes the honest one, and names the defect of every other."""

import asyncio
import json
from pathlib import Path

import pytest

from buckeye.envs.check import CheckOptions, check_environment
from buckeye.errors import UsageError

TOY = str(Path(__file__).with_name("toy.py"))
SUBPROCESS = "same tasks in another process"


def check(variant, **options):
    options = {"sample": 60, "limit": 0.03, **options}
    return asyncio.run(check_environment(TOY, {"variant": variant}, CheckOptions(**options)))


def failures(report):
    return {result.name: result.detail for result in report.checks if result.status == "fail"}


@pytest.fixture(autouse=True)
def one_process(request, monkeypatch):
    """The second process takes a second; only the tests of it start one."""
    if "real_process" not in request.fixturenames:
        monkeypatch.setattr("buckeye.envs.check.fingerprint_elsewhere", lambda *_: here(*_))


def here(env_id, args, splits, seed):
    from buckeye.envs.honesty.fingerprint import fingerprint
    from buckeye.envs.registry import load_environment

    return fingerprint(load_environment(env_id, **args), splits, seed)


@pytest.fixture
def real_process():
    """Asked for by the tests that start the second process."""


def test_an_honest_environment_passes(real_process):
    report = check("honest")
    assert failures(report) == {}
    assert report.passed
    assert [r.name for r in report.checks if r.status == "not run"] == []
    assert report.sizes == {"train": 60, "eval": 60}
    assert {(s.family, s.split) for s in report.scores} == {("reverse", "train"), ("reverse", "eval")}
    assert max(s.mean for s in report.scores) <= 0.03


DEFECTS = [
    ("shown", "no answer in the prompt", "120 show it, as train-"),
    ("constant", "content-free policies below 0.03", "1.000 by 'one string always' on reverse in"),
    ("echo", "content-free policies below 0.03", "0.100 by 'its first quotation' on reverse in"),
    ("letters", "content-free policies below 0.03", " by 'one string always' on reverse in"),
    ("dump", "content-free policies below 0.03", "1.000 by 'all short words' on reverse in"),
    ("overlap", "train and held-out apart", "60 of 60 tasks of eval are in train too, as eval-"),
    ("one id", "task ids", "same names two tasks: one in train, another in train"),
    ("another each time", "same tasks when made again", "in one, "),
    ("dice", "same grade again", "then reward 0."),
    ("memory", "same grade again", "(done, call "),
    ("too much", "rewards from 0 to 1", "1.5 for train-"),
    ("not a number", "rewards from 0 to 1", "nan for train-"),
    ("wrong probe", "probes", "1 of 2 wrong, as 'right': got 1, not 0.5"),
    ("pays nothing", "accepted answers are paid", "40 of 40 earn less than 0.5"),
    ("raises", "every reply is graded", "LookupError: no tag in the reply"),
    ("swallows", "errors are not scored", "a failing engine gets reward 0 on train-"),
    ("endless", "every reply is graded", "the rollout asked for more than 1000 replies"),
]


@pytest.mark.parametrize(("variant", "name", "why"), DEFECTS, ids=[variant for variant, *_ in DEFECTS])
def test_a_defect_fails_its_check_by_name(variant, name, why):
    report = check(variant, sample=60 if variant != "endless" else 5)
    found = failures(report)
    assert why in found.get(name, f"not failed; failed are {found}")
    assert not report.passed


@pytest.mark.parametrize(
    ("variant", "others"),
    [
        ("shown", set()),
        ("overlap", set()),
        ("too much", {"rewards from 0 to 1", "probes"}),
        ("wrong probe", set()),
        ("swallows", set()),
        ("echo", set()),
        ("another each time", {"same tasks when made again", SUBPROCESS}),
    ],
)
def test_a_defect_fails_no_other_check(variant, others):
    found = set(failures(check(variant)))
    expected = others or {name for v, name, _ in DEFECTS if v == variant}
    assert found == expected


def test_tasks_that_depend_on_the_hash_seed_fail(real_process):
    found = failures(check("hash seed"))
    assert set(found) == {SUBPROCESS}
    assert "in the other" in found[SUBPROCESS]


def test_a_single_lucky_answer_in_a_small_family_is_not_a_leak():
    """With 10 tasks each answer solves a tenth, far above 0.03, by being one of them."""
    report = asyncio.run(
        check_environment(TOY, {"size": 10}, CheckOptions(sample=60, limit=0.03)),
    )
    assert max(score.mean for score in report.scores) == pytest.approx(0.1)
    content_free = next(r for r in report.checks if r.name.startswith("content-free"))
    assert "one lucky answer forgiven in " in content_free.detail
    assert report.passed


def content_free(**options):
    """The content-free check of the toy whose prompts are worth 0.1 when said again, with these options."""
    report = asyncio.run(
        check_environment(TOY, {"size": 60, "variant": "lucky"}, CheckOptions(limit=0.03, **options))
    )
    return next(r for r in report.checks if r.name.startswith("content-free"))


def test_a_sample_too_small_for_the_limit_is_no_pass():
    """One task in six is solved by its prompt. Few of many tasks cannot tell luck from that."""
    small, large = content_free(sample=2), content_free(sample=40)
    assert (small.status, large.status) == ("not run", "fail")
    assert "sample too small for reverse in " in small.detail
    assert "with 2 of 60 tasks played; give --sample 34" in small.detail


def test_two_solved_tasks_are_too_many_for_any_sample():
    assert content_free(sample=20).status == "fail"


def test_an_environment_without_a_train_split_is_checked_without_a_constant():
    report = check("eval only")
    assert failures(report) == {}
    assert report.sizes == {"eval": 60}
    policies = {score.policy for score in report.scores}
    assert "one string always" not in policies
    assert "another task's answer" in policies


def test_a_held_out_family_that_is_not_trained_is_played_with_the_constants_of_the_others():
    report = check("new family")
    assert failures(report) == {}
    assert ("one string always", "new") in {(score.policy, score.family) for score in report.scores}


def test_the_best_constant_is_climbed_to():
    """The toy pays 0.2 for the share of b's, and no word of its prompts is all b's."""
    report = check("letters")
    best = max(report.scores, key=lambda score: score.mean)
    assert best.policy == "one string always"
    assert best.mean > 0.1


def test_the_limit_is_a_choice():
    assert check("echo", limit=0.15).passed
    assert not check("echo", limit=0.09).passed


def test_without_answers_in_the_data_what_needs_them_is_not_run():
    report = check("no answers")
    assert report.passed
    assert {r.name for r in report.checks if r.status == "not run"} == {
        "no answer in the prompt",
        "accepted answers are paid",
    }


def test_without_a_held_out_split_there_is_nothing_to_keep_apart():
    report = check("train only")
    assert [(r.name, r.detail) for r in report.checks if r.status == "not run"] == [
        ("train and held-out apart", "there is only train")
    ]


def test_the_report_is_json():
    report = json.loads(json.dumps(check("raises").to_json(), allow_nan=False))
    assert report["environment"] == "toy"
    assert report["passed"] is False
    nothing = next(s for s in report["content_free"] if s["policy"] == "nothing")
    assert nothing["tasks"] + nothing["errored"] == 60
    assert {c["status"] for c in report["checks"]} <= {"pass", "fail", "not run"}
    assert [(p["got"], p["error"] is None, p["passed"]) for p in report["probes"]] == [
        (1.0, True, True),
        (None, False, False),
    ]


def test_the_same_seed_gives_the_same_report():
    first, second = (check("echo", seed=7).to_json() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_an_environment_that_cannot_give_its_tasks_is_a_usage_error(tmp_path):
    path = tmp_path / "hollow.py"
    path.write_text(
        "class Hollow:\n    name = 'hollow'\n    splits = ('train',)\n"
        "    def tasks(self, split): return []\n    async def rollout(self, task, policy): ...\n"
        "def load_environment(): return Hollow()\n"
    )
    with pytest.raises(UsageError, match="hollow has no tasks in its split 'train'"):
        asyncio.run(check_environment(str(path), {}, CheckOptions(sample=5, limit=0.03)))


GAMES = """
import asyncio
from buckeye.envs.base import Outcome, Task

class Games:
    name = "games"

    def tasks(self, split):
        prompt = {"role": "user", "content": "Play."}
        starts = {"train": range(4), "eval": FIRST_OF_EVAL}[split]
        return [Task(id=f"{split}-{n}", messages=(prompt,), data={"start": str(n)}) for n in starts]

    async def rollout(self, task, policy):
        for _ in range(100):
            await policy.chat(task.messages)
        await asyncio.sleep(0.02)
        return Outcome(reward=0.0)

def load_environment():
    return Games()
"""


@pytest.mark.parametrize(
    ("held_out", "wrong"), [("range(4, 8)", []), ("range(3, 8)", ["train and held-out apart"])]
)
def test_a_game_of_many_slow_turns_whose_tasks_differ_in_their_start(tmp_path, monkeypatch, held_out, wrong):
    monkeypatch.setattr("buckeye.envs.check._SECONDS", 1.0)
    path = tmp_path / "games.py"
    path.write_text(GAMES.replace("FIRST_OF_EVAL", held_out))
    report = asyncio.run(check_environment(str(path), {}, CheckOptions(sample=None, limit=0.03)))
    assert list(failures(report)) == wrong
    assert report.sample == 1  # of those that take 0.02 s, 1 s has time for 40 rollouts of one task
    assert all(score.scored == 1 for score in report.scores)
