"""Findings from a run's metrics: the three ways not to learn, and learning, from real records."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.monitor.learning_findings import explain_no_learning, findings
from buckeye.monitor.metrics import RunMetrics

RUN = Path("outputs/a run")


def steps(*batches, trainer=()):
    """Return the steps of a run, with these batch metrics on top of those of a normal batch."""
    usual = {
        "reward/std": 0.4,
        "batch/groups": 4,
        "batch/rollouts": 32,
        "batch/alike": 0.0,
        "batch/solve_all": 0.0,
        "batch/solve_none": 0.25,
        "batch/with_spread": 0.75,
        "is_truncated/mean": 0.1,
        "completion_len/mean": 40.0,
    }
    of_training = {"trained_tokens": 900.0, "entropy": 1.0, "effective_sample_size": 0.9}
    records = [
        {"process": "orchestrator", "step": step, **usual, **batch} for step, batch in enumerate(batches)
    ]
    records += [
        {"process": "trainer", "step": step, **of_training, **(trainer[step] if step < len(trainer) else {})}
        for step in range(len(batches))
    ]
    return RunMetrics(records).steps()


def named(made):
    return [finding.name for finding in findings(made, RUN)]


EQUAL = {"batch/with_spread": 0.0, "reward/std": 0.0}
CONSTANT = {**EQUAL, "reward/mean": 0.5, "is_truncated/mean": 1.0}
SOLVED = {**EQUAL, "reward/mean": 1.0, "batch/solve_all": 1.0, "batch/solve_none": 0.0}


def test_a_constant_reward_is_called_that_however_the_replies_end(wording):
    assert named(steps(CONSTANT, CONSTANT)) == []
    (finding,) = findings(steps(CONSTANT, CONSTANT, CONSTANT), RUN)
    assert (finding.name, finding.since, finding.until) == ("constant_reward", 0, 2)
    assert finding.figures["reward/mean"] == 0.5
    assert finding.command == wording
    assert str(finding) == wording
    assert explain_no_learning(steps(*[CONSTANT] * 6), RUN) == wording
    json.dumps(asdict(finding))


def test_replies_that_have_no_end_are_told_also_where_rewards_differ(wording):
    cut = {"reward/mean": 0.01, "reward/std": 0.06, "is_truncated/mean": 0.97, "completion_len/mean": 2.0}
    assert named(steps(cut, cut)) == []
    (finding,) = findings(steps(*[cut] * 4), RUN)
    assert (finding.name, finding.since) == ("truncated", 0)
    assert finding.seen == wording
    assert "raise `orchestrator.sampling.max_tokens`" in explain_no_learning(steps(*[cut] * 6), RUN)
    none = {**cut, **EQUAL, "reward/mean": 0.0, "batch/solve_none": 1.0}
    assert named(steps(none, none, none)) == ["truncated"]


def test_cut_off_replies_of_an_unknown_length(wording):
    cut = {"reward/mean": 0.01, "is_truncated/mean": 1.0, "completion_len/mean": None}
    (finding,) = findings(steps(*[cut] * 4), RUN)
    assert finding.seen == wording


def test_a_policy_that_no_longer_ends_its_replies_needs_no_more_tokens(wording):
    cut = {"reward/mean": 0.1, "is_truncated/mean": 1.0}
    (finding,) = findings(steps({"reward/mean": 0.2}, cut, cut, cut), RUN)
    assert (finding.name, finding.since) == ("endless", 1)
    assert finding.advice == wording


def test_a_policy_that_learns_although_its_replies_are_cut_off_is_left_alone():
    """The reward of 96 rollouts exceeds that of 32 by 0.3, with a standard error of 0.08."""
    cut = [{"reward/mean": reward, "is_truncated/mean": 1.0} for reward in (0.1, 0.2, 0.4, 0.4, 0.4)]
    assert named(steps(*cut[:3])) == ["truncated"]
    assert named(steps(*cut)) == []
    assert explain_no_learning(steps(*cut), RUN) is None


@pytest.mark.parametrize(("before", "has_lost"), [(0.4, True), (0.01, False)])
def test_tasks_that_are_no_longer_solved_were_lost(before, has_lost):
    none = {**EQUAL, "reward/mean": 0.0, "batch/solve_none": 1.0}
    (finding,) = findings(steps(*[{"reward/mean": before}] * 4, none, none, none), RUN)
    assert (finding.name, finding.since) == ("none_solved", 4)
    assert ("--trainer.optim.lr" in finding.advice or "a tenth of" in finding.advice) == has_lost


def test_a_collapse(wording):
    good = {"reward/mean": 0.3}
    same = {
        **EQUAL,
        "reward/mean": 0.0,
        "batch/alike": 1.0,
        "batch/solve_none": 1.0,
        "is_truncated/mean": 1.0,
    }
    torn = {"effective_sample_size": 0.01, "entropy": 0.0}
    nothing = {"trained_tokens": 0.0, "entropy": None, "effective_sample_size": None}
    made = steps(good, good, good, same, same, same, trainer=[{}, torn, torn, nothing, nothing, nothing])
    assert named(made) == ["collapsed", "moved_too_far"]
    assert explain_no_learning(made, RUN) == wording
    assert named(made[:2]) == []  # one step may be due to a single token: a run that learned had 0.012 in it
    assert named(made[:3]) == ["moved_too_far"]
    assert "step 1" in findings(made[:3], RUN)[0].seen
    assert findings(made[:3], RUN)[0].seen == wording
    left_out = {"masked_low": 0.7, "masked_high": 0.25}
    assert named(steps(good, trainer=[left_out])) == ["moved_too_far"]
    assert named(steps(*[good] * 4, trainer=[left_out])) == []  # long ago


def test_what_was_learnt_before_a_collapse_was_lost(wording):
    same = {**EQUAL, "reward/mean": 0.2, "batch/alike": 1.0}
    risen = [{"reward/mean": reward} for reward in (0.1, 0.3, 0.7, 0.8, 0.8)]
    assert explain_no_learning(steps(*risen, *[same] * 4), RUN) == wording
    assert explain_no_learning(steps(*risen), RUN) is None


def test_a_run_that_has_converged_has_learnt():
    rising = [{"reward/mean": reward} for reward in (0.1, 0.4, 0.8)]
    assert named(steps(*rising, *[{**SOLVED, "batch/alike": 1.0}] * 9)) == []
    best = {**EQUAL, "reward/mean": 0.8, "batch/alike": 1.0}  # the maximum reward of this environment
    assert named(steps(*rising, *[best] * 9)) == []


def test_a_run_that_had_nothing_to_learn_has_not(wording):
    assert named(steps(*[SOLVED] * 3)) == ["all_solved"]
    assert explain_no_learning(steps(*[SOLVED] * 5), RUN) == wording


@pytest.mark.parametrize("seed", range(8))
def test_rare_rewards_of_one_are_no_reason_to_warn(seed):
    """Most groups of such a run have no spread, but one in any three consecutive batches has."""
    rare = {"reward/mean": 1 / 32, "reward/std": 0.17, "batch/with_spread": 0.25, "batch/solve_none": 0.75}
    none = {**EQUAL, "reward/mean": 0.0, "batch/solve_none": 1.0}
    batches = [rare if (step + seed) % 3 == 0 else none for step in range(12)]
    assert named(steps(*batches)) == []
    assert explain_no_learning(steps(*batches), RUN) is None


def biased(kind, relative, errors, measure="seconds"):
    name = f"collection/{kind}/{measure}"
    return {"reward/mean": 0.3, name: relative, f"{name}/errors": errors}


def test_what_is_trained_on_is_not_what_was_sampled(wording):
    (finding,) = findings(steps({}, biased("bias", -0.12, -6.0)), RUN)
    assert finding.name == "biased"
    assert finding.seen == wording
    (finding,) = findings(steps(biased("failures", -0.3, -9.0, "completion_len")), RUN)
    assert str(finding) == wording
    (finding,) = findings(steps(biased("failures", -0.2, -5.0, "reward")), RUN)
    assert (finding.name, finding.seen) == wording
    assert named(steps(biased("failures", 0.2, 5.0, "reward"))) == []  # failures of all lengths alike
    assert named(steps(biased("failures", -0.2, -3.0, "reward"))) == []  # noise
    assert named(steps(biased("bias", -0.12, -3.0))) == []  # noise
    assert named(steps(biased("bias", -0.001, -9.0))) == []  # significant, but too small to matter
    assert named(steps(biased("bias", -0.12, -6.0), {"reward/mean": 0.3})) == []  # the bias is over


def test_a_bias_is_no_reason_that_nothing_was_learnt():
    made = steps(*[{"reward/mean": 0.3, **biased("bias", -0.12, -6.0)}] * 4)
    assert named(made) == ["biased"]
    assert explain_no_learning(made, RUN) is None


def test_records_of_before_say_nothing():
    """Records of earlier versions lack some of the metrics."""
    records = [{"process": "orchestrator", "step": step, "reward/mean": 0.5} for step in range(9)]
    assert findings(RunMetrics(records).steps(), RUN) == []
    assert explain_no_learning([], RUN) is None


ODD = st.sampled_from([0.0, 1.0, -1.0, 1e30, 1e308, -1e308, float("inf"), float("nan"), None, "1"])
NAMES = st.sampled_from(["reward/mean", "reward/std", "reward/played", "batch/groups", "batch/rollouts"])


@given(st.lists(st.dictionaries(NAMES, ODD), min_size=3, max_size=8), st.booleans())
def test_no_record_is_too_odd(batches, equal):
    """Records of a damaged file, or an extremely large loss, end neither a run nor `status`."""
    made = steps(*({**batch, **({"batch/with_spread": 0.0} if equal else {})} for batch in batches))
    findings(made, RUN)
    explain_no_learning(made, RUN)


def test_what_has_collapsed_is_gone_on_with_from_before_it_did(tmp_path, wording):
    run = tmp_path / "run"
    for step in (2, 4, 6):
        checkpoint = run / "checkpoints" / f"step_{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMMITTED").write_text(json.dumps({"attempt": 1, "files": {}}))
    (run / "configs").mkdir()
    (run / "configs" / "rl.json").write_text(json.dumps({"trainer": {"optim": {"lr": 3e-4}}}))
    alike = {**EQUAL, "reward/mean": 0.0, "batch/solve_none": 1.0, "batch/alike": 1.0}
    good = {"reward/mean": 0.5}
    (finding,) = findings(steps(*[good] * 5, *[alike] * 4), run)
    assert (finding.name, finding.since) == ("collapsed", 5)
    assert finding.advice == wording


@pytest.mark.parametrize(("logprob", "name"), [(-6.9, "untrained"), (-4.1, "untrained"), (-1.0, "truncated")])
def test_random_replies_are_those_of_untrained_weights(logprob, name, wording):
    cut = {"reward/mean": 0.0, **EQUAL, "is_truncated/mean": 1.0, "batch/solve_none": 1.0}
    later = {**cut, "logprob/mean": -9.0}  # a policy that has collapsed does not count
    made = steps({**cut, "logprob/mean": logprob}, *[later] * 3)
    (finding,) = findings(made, RUN)
    assert finding.name == name
    assert explain_no_learning(made, RUN) == wording


def test_known_cause_is_not_explained_again(wording):
    made = steps(*[CONSTANT] * 4)
    assert explain_no_learning(made, RUN, is_known=lambda cause: True) == wording
