"""Each rule names the fault planted in synthetic records, and correct runs have no findings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.analysis.diagnosis.made_runs import END, FIRST, Made, make
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from buckeye.analysis.diagnosis.diagnose import diagnose
from buckeye.analysis.diagnosis.statistics import share_interval, slope_interval
from buckeye.launch.changed_settings import former_config
from buckeye.run_files.events import write_event


def named(run, **options):
    done = diagnose(run, **options)
    assert done.failed_rules == {}
    assert done.not_looked_at == []
    return [one.name for one in done.findings if one.confidence != "possible"]


def swapped(advantages, rng):
    return rng.permutation(advantages)


def in_bfloat16(logprobs):
    return (np.asarray(logprobs, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def of_neighbor():
    """Return a reward function that grades the reply before."""
    before = [np.zeros(1)]

    def reward(word, task, rng):
        before.append(word)
        return float(before.pop(0)[0] < 2)

    return reward


def ended(text, stop_reason="truncated"):
    """Return a function that gives a record a reply with `text`, and a stop reason."""

    def change(line):
        reply = {"role": "assistant", "content": f"a{text}b"}
        is_cut = stop_reason == "truncated"
        messages = [*line["messages"][:-1], reply]
        return {**line, "messages": messages, "truncated": is_cut, "stop_reason": stop_reason}

    return change


def graded(word, task, rng):
    """Return a reward that has spread in nearly all groups."""
    return float(word.sum() + word[0] / 10)


def by_task(word, task, rng):
    """Return a reward of another word for each task; with any table of letters, some words differ in it."""
    return float(word.sum() % 5 == task % 5)


def last_letter(word, task, rng):
    """Return a reward that the drift of the tables does not change."""
    return float(word[-1] == 0)


def shaped_by_length(line):
    return {**line, "shaped_reward": line["reward"] - 5 * line["messages"][-1]["content"].count("e")}


def of_shared_state(line):
    """Add a turn whose observation depends on the rollouts before."""
    contents = [line["messages"][0]["content"], "open", f"room {line['group'] + line['reward']}", "leave"]
    messages = [
        {"role": role, "content": content}
        for role, content in zip(["user", "assistant"] * 2, contents, strict=True)
    ]
    return {**line, "turns": 2, "messages": messages, "text": [" ".join(contents)]}


def of_old_state(line):
    """Add turns whose observations are those of the turn before."""
    asked = line["messages"][0]["content"]
    contents = [asked, "go", asked, "go", f"task {line['group'] % 12}", "go"]
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    return {**line, "turns": 3, "messages": messages, "text": [" ".join(contents)]}


def of_two_components(line):
    """Add a component that falls by half in each step, and one that rises."""
    step = line["group"] // 8
    components = {"right": 0.5**step, "detail": step + 0.1 * line["messages"][-1]["content"].count("a")}
    reward = sum(components.values())
    return {**line, "components": components, "reward": reward, "shaped_reward": reward}


def of_cut_observations(line):
    """Add a turn whose observation is cut after 12 characters."""
    asked = line["messages"][0]["content"]
    article = ("a", "the", "one", "my")[int(asked.split()[-1]) % 4]
    contents = [asked, "look", f"{article} green doors"[:12], line["messages"][-1]["content"]]
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    return {**line, "turns": 2, "messages": messages, "text": [" ".join(contents)]}


def with_outer_baseline(line):
    return {**line, "advantages": [line["advantages"][0] + 0.2]}


def of_silence(line):
    """Make rewards those of a policy that at first tries, and then is silent."""
    step, word = divmod(line["group"], 8)[0], line["messages"][-1]["content"]
    reward = 0.0 if step > 3 else 1.0 if word[0] in "ab" else -1.0
    return {**line, "reward": reward, "shaped_reward": reward, "components": {}}


def sometimes_other(word, task, rng):
    return float((word[-1] == 0) != (rng.random() < 0.1))


def rising(step):
    """Return metrics of a reward that rises from 0.2 to 0.8 in 14 steps."""
    reward = 0.2 + 0.6 * step / 13
    return {"orchestrator": {"reward/mean": reward, "reward/played": reward}}


PLANTED = {
    "sampled_otherwise": Made(draw=lambda table: table / 3, reward=graded, groups=40),
    "messages_cut": Made(line=lambda line: {**line, "text": [line["text"][0][4:]]}),
    "wrong_end_token": Made(line=ended("<|im_end|>")),
    "turn_limit": Made(reward=lambda word, task, rng: 0.0, line=ended("", "max_turns")),
    "cut_prompts": Made(asked=lambda task: f"Task {task + 10 ** (task % 7)} spell letters"[:18]),
    "stale_observations": Made(line=of_old_state),
    "rewards_unlearned": Made(reward=last_letter, steps=32),
    "shaping_outweighs": Made(line=shaped_by_length),
    "unrepeatable_observations": Made(line=of_shared_state, reward=last_letter, steps=24),
    "prompt_incomplete": Made(asked=lambda task: "say", reward=last_letter, steps=24, evaluated=(0, 1, 2)),
    "unused_prompts": Made(reward=by_task, same_replies=True, steps=24),
    "observations_lost": Made(line=of_cut_observations),
    "mask_misplaced": Made(mask=lambda mask: np.roll(mask, -1)),
    "rounded_log_probs": Made(sampled=in_bfloat16),
    "advantages_misplaced": Made(advantages=swapped),
    "end_not_trained": Made(mask=lambda mask: np.r_[mask[:-1], False]),
    "equal_seeds": Made(equal=True),
    "stale_weights": Made(sampler=lambda tables, version, number: tables[0]),
    "one_engine_stale": Made(sampler=lambda tables, version, number: tables[version if number % 2 else 0]),
    "weights_arrive_changed": Made(
        sampler=lambda tables, version, number: tables[0] + 0.5 * (tables[version] - tables[0])
    ),
    "temperature_mismatch": Made(sampler=lambda tables, version, number: tables[version] / 0.7),
    "neighbor_reward": Made(reward=of_neighbor(), steps=14),
    "grader_random": Made(reward=lambda word, task, rng: float(rng.random())),
    "grader_never_pays": Made(grade=lambda reward: 0.0),
    "duplicate_tasks": Made(prompt=lambda task: task // 4),
    "evaluated_on_train": Made(evaluated=(0, 1, 2, 3, 4)),
    "learning_rate_too_low": Made(drift=1e-5, steps=14),
}


TRAINER = {"model": {"dtype": "float32", "device": "cpu"}}
FLAT = Made(steps=14, drift=0.0)
BY_METRICS = {
    "updates_skipped": ({}, lambda step: {"trainer": {"skipped": float(step % 3 > 0), "updates": 1.0}}),
    "warmup_too_long": (
        {"trainer": {**TRAINER, "optim": {"lr": 1e-3}, "scheduler": {"warmup": 900}, "max_steps": 14}},
        lambda step: {"trainer": {"lr": 1e-6 * (step + 1)}},
    ),
    "learning_rate_decayed": (
        {"trainer": {**TRAINER, "optim": {"lr": 1e-3}, "scheduler": {"type": "linear"}}},
        lambda step: {"trainer": {"lr": 1e-3 * 0.2**step}},
    ),
    "weight_decay": (
        {"trainer": {**TRAINER, "optim": {"lr": 1e-2, "weight_decay": 2.0}}},
        lambda step: {"trainer": {"lr": 1e-2}},
    ),
    "penalty_too_strong": ({"trainer": {**TRAINER, "loss": {"kl_coef": 5.0}}}, lambda step: {}),
    "reference_moves": (
        {"trainer": {**TRAINER, "loss": {"kl_coef": 0.02}}},
        lambda step: {"trainer": {"reference_kl": 0.0, "update/logprob_change": 0.1}},
    ),
    "no_gradient": ({}, lambda step: {"trainer": {"grad_norm": 0.0}}),
    "update_against_advantages": ({}, lambda step: {"trainer": {"update/agreement": -0.2 - 0.01 * step}}),
    "untrained": ({}, lambda step: {"orchestrator": {"logprob/mean": -5.6}}),
    "one_reply": ({}, lambda step: {"orchestrator": {"logprob/mean": -0.01, "batch/alike": 0.9}}),
    "temperature_too_low": (
        {"orchestrator": {"sampling": {"temperature": 0.1}}},
        lambda step: {"orchestrator": {"logprob/mean": -0.01, "batch/alike": 0.9}},
    ),
    "temperature_too_high": (
        {"orchestrator": {"sampling": {"temperature": 5.0}}},
        lambda step: {"orchestrator": {"logprob/mean": -5.6}},
    ),
}


def with_tokenizer(run):
    """Write the tokenizer of the letters of made runs. Other characters are unknown tokens."""
    vocabulary = {letter: FIRST + at for at, letter in enumerate("abcde")} | {"END": END, "\ufffd": 0}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="\ufffd"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    (run / "weights" / "step_0").mkdir(parents=True)
    tokenizer.save(str(run / "weights" / "step_0" / "tokenizer.json"))
    return run


def with_metrics(run, metrics):
    """Add metrics, by process, to the records of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, **metrics(line["step"]).get(line["process"], {})} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_a_narrow_sampling_is_not_taken_for_a_model_with_one_reply(tmp_path, name):
    sampling = {"orchestrator": {"sampling": {name: {"top_k": 1, "top_p": 0.1}[name]}}}
    run = make(tmp_path / "run", replace(FLAT, settings=sampling))
    assert named(with_metrics(run, BY_METRICS["one_reply"][1]))[0] == "temperature_too_low"


AGREEMENT = {0: 0.05, 1: 0.0, 3: 0.05, 7: 0.0}
BY_ELIMINATION = {
    "stale_samples": lambda step: {"staleness_mean": 5.0},
    "update_against_advantages": lambda step: (
        {"update/agreement": AGREEMENT[step]} if step in AGREEMENT else {}
    ),
}


def test_noisy_agreements_of_updates_are_no_evidence(tmp_path):
    noisy = {0: 0.46, 1: -0.29, 3: -0.08, 7: 0.06}
    run = make(tmp_path / "run", PLANTED["rewards_unlearned"])
    with_metrics(run, lambda step: {"trainer": {"update/agreement": noisy[step]} if step in noisy else {}})
    assert named(run)[0] == "rewards_unlearned"


@pytest.mark.parametrize("name", BY_ELIMINATION)
def test_weak_evidence_counts_in_a_run_that_does_not_learn(tmp_path, name):
    run = make(tmp_path / "run", PLANTED["rewards_unlearned"])
    with_metrics(run, lambda step: {"trainer": BY_ELIMINATION[name](step)})
    assert named(run)[0] == name


@pytest.mark.parametrize("name", BY_METRICS)
def test_what_metrics_and_settings_show_is_named_first(tmp_path, name):
    settings, metrics = BY_METRICS[name]
    run = make(tmp_path / "run", replace(FLAT, settings=settings))
    assert name not in [finding.name for finding in diagnose(run).findings] or name == "penalty_too_strong"
    assert named(with_metrics(run, metrics))[0] == name


def test_a_low_learning_rate_is_corrected_by_the_measured_factor(tmp_path):
    settings = {"trainer": {**TRAINER, "optim": {"lr": 1e-6}}}
    run = make(tmp_path / "run", replace(FLAT, settings=settings))
    finding = diagnose(with_metrics(run, lambda _: {"trainer": {"update/logprob_change": 0.0014}})).findings[
        0
    ]
    assert finding.name == "learning_rate_too_low"
    assert "about 100 times, to 1.0e-04" in finding.advice  # 0.14 / 0.0014


def test_a_count_of_one_is_singular(tmp_path):
    assert "tasks have 1 distinct prompt," in str(
        diagnose(make(tmp_path / "run", PLANTED["prompt_incomplete"]))
    )


def with_evaluations(run, rewards):
    """Write evaluations, each with rewards by task; prompts are other tasks."""
    for step, found in rewards.items():
        folder = run / "evals" / f"step_{step}"
        folder.mkdir(parents=True)
        messages = [{"role": "user", "content": "other words"}, {"role": "assistant", "content": "x"}]
        lines = (
            {"task_id": f"eval-{task}", "rollout": 0, "reward": reward, "messages": messages}
            for task, reward in enumerate(found)
        )
        (folder / "made.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize("last", [(0.0, 1.0), (1.0, 0.0)], ids=["as the first", "another"])
def test_evaluations_that_never_change_are_stale(tmp_path, last):
    rewards = {0: (0.0, 1.0) * 6, 7: (0.0, 1.0) * 6, 13: last * 6}
    found = named(with_evaluations(with_metrics(make(tmp_path / "run", FLAT), rising), rewards))
    assert ("stale_evaluations" in found) == (last == (0.0, 1.0))


@pytest.mark.parametrize("kinds", [1, 3])
def test_held_out_kinds_that_training_lacks_are_named(tmp_path, kinds):
    """Tasks of evaluations are of three kinds, and only some of the training tasks are."""
    made = replace(FLAT, tasks=12, asked=lambda task: f"number {task} {'abc'[task % kinds]}")
    run = with_evaluations(with_metrics(make(tmp_path / "run", made), rising), {0: (0.2,), 13: (0.2,)})
    for step in (0, 13):
        lines = (
            {
                "task_id": f"eval-{task}",
                "rollout": 0,
                "reward": 0.1 * (task % 7),
                "messages": [
                    {"role": "user", "content": f"number {task} {'abc'[task % 3]}"},
                    {"role": "assistant", "content": "x"},
                ],
            }
            for task in range(20, 60)
        )
        (run / "evals" / f"step_{step}" / "made.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    assert ("narrow_tasks" in named(run)) == (kinds == 1)


@pytest.mark.parametrize("cut", [False, True])
def test_evaluations_whose_replies_alone_are_cut_are_named(tmp_path, cut):
    settings = {"orchestrator": {"env": [{"id": "made"}], "eval": {"env": [{"id": "made"}]}}}
    run = with_metrics(make(tmp_path / "run", replace(FLAT, settings=settings, reward=graded)), rising)
    with_evaluations(run, {0: (0.1, 0.3) * 12, 13: (0.3, 0.5) * 12})
    path = run / "evals" / "step_13" / "made.jsonl"
    lines = [{**json.loads(line), "truncated": cut} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ("evaluated_otherwise" in named(run)) == cut


@pytest.mark.parametrize("last", [0.1, 0.8])
def test_an_evaluation_that_falls_while_the_reward_rises_is_named(tmp_path, last):
    rewards = {step: (mean - 0.1, mean + 0.1) * 12 for step, mean in ((0, 0.3), (7, 0.8), (13, last))}
    run = with_evaluations(with_metrics(make(tmp_path / "run", FLAT), rising), rewards)
    assert ("reward_sign" in named(run)) == (last == 0.1)


def test_an_evaluation_of_another_environment_says_nothing_about_training(tmp_path):
    run = with_metrics(make(tmp_path / "run", FLAT), rising)
    with_evaluations(run, {step: (mean - 0.1, mean + 0.1) * 12 for step, mean in ((0, 0.8), (13, 0.1))})
    assert named(run) == ["reward_sign", "no_transfer"]
    for path in (run / "evals").glob("step_*/made.jsonl"):
        path.rename(path.with_name("other.jsonl"))
    assert named(run) == []


def test_a_noisy_reward_is_not_random(tmp_path):
    """All repeated replies have different rewards, but noise is a small part of their variance."""
    made = Made(reward=lambda word, task, rng: 10 * (word[0] < 2) + rng.normal(0, 1), steps=14)
    run = make(tmp_path / "run", made)
    assert "grader_random" not in named(run)


def test_replies_that_are_cut_and_not_trained_are_named(tmp_path):
    settings = {"trainer": TRAINER, "orchestrator": {"mask_truncated_completions": True}}
    made = Made(settings=settings, line=lambda line: {**line, "truncated": bool(line["reward"] == 0.0)})
    assert "truncated_replies" in named(make(tmp_path / "run", made))


def test_replies_with_invalid_bytes_are_not_taken_for_untrained_tokens(tmp_path):
    def invalid(line):
        asked, said = line["messages"]
        return {**line, "messages": [asked, {**said, "content": "\ufffd" * 3 * len(said["content"])}]}

    run = make(tmp_path / "run", Made(line=invalid))
    assert named(with_tokenizer(run)) == []


@pytest.mark.parametrize("rises", [False, True])
def test_turns_without_history_are_named_in_a_run_that_does_not_learn(tmp_path, rises):
    def metrics(step):
        found = rising(step) if rises else {"orchestrator": {}}
        return {"orchestrator": {**found["orchestrator"], "turns/branched": 64.0, "turns/extended": 0.0}}

    run = with_metrics(make(tmp_path / "run", FLAT), metrics)
    assert ("history_lost" in named(run)) != rises


def test_trained_tokens_that_are_random_to_the_trainer_are_named(tmp_path):
    run = make(tmp_path / "run", Made(drift=0.0))
    for path in (run / "trained").glob("step_*/trained.safetensors"):
        arrays = load_file(path)
        save_file({**arrays, "logprobs": arrays["logprobs"] - 5.0}, path)
    assert named(run)[0] == "mask_misplaced"


@pytest.mark.parametrize("since", [0, 7])
def test_rewards_that_vanish_later_are_a_consequence(tmp_path, since):
    def metrics(step):
        gone = {"batch/with_spread": 0.0, "batch/solve_none": 1.0, "reward/mean": 0.0, "reward/std": 0.0}
        return {"orchestrator": gone if step >= since else {}}

    run = with_metrics(make(tmp_path / "run", replace(FLAT, steps=20, advantages=swapped)), metrics)
    found = named(run)
    assert (found[0] == "advantages_misplaced") == (since == 7)
    assert "none_solved" in found


@pytest.mark.parametrize("last", [0.1, 0.9])
def test_an_evaluation_that_fell_is_named(tmp_path, last):
    """The training reward says nothing: it is flat."""
    rewards = {step: (mean - 0.1, mean + 0.1) * 12 for step, mean in ((0, 0.2), (7, 0.9), (13, last))}
    found = named(with_evaluations(make(tmp_path / "run", FLAT), rewards))
    assert ("reward_fell" in found) == (last == 0.1)


def test_a_check_that_fails_is_reported_and_hides_nothing(tmp_path, monkeypatch):
    def broken_check(facts):
        raise IndexError("planted")

    monkeypatch.setattr("buckeye.analysis.diagnosis.chain._BY_ELIMINATION", [("tasks", broken_check)])
    done = diagnose(make(tmp_path / "run", Made()))
    assert done.failed_rules == {"broken_check": "IndexError: planted"}
    assert len(done.links) == 9


def test_advantages_other_than_those_of_the_settings_are_named(tmp_path):
    """A wrong baseline keeps the order within groups."""
    settings = {"trainer": TRAINER, "orchestrator": {"advantage": {"type": "group"}}}
    right = Made(settings=settings)
    wrong = replace(right, line=with_outer_baseline, advantages=lambda advantages, rng: advantages + 0.2)
    assert named(make(tmp_path / "right", right)) == []
    run = make(tmp_path / "wrong", wrong)
    assert named(run) == ["advantages_misplaced"]
    # a resume at the last step has set other settings, so earlier steps are not compared with them
    before = {**settings, "orchestrator": {"advantage": {"type": "group", "leave_one_out": True}}}
    (run / former_config(9)).write_text(json.dumps(before))
    assert named(run) == []


def test_advantages_of_components_are_compared_with_their_own_formula(tmp_path):
    """One component counts negative, so higher rewards have lower advantages."""
    kind = {"type": "components", "weights": {"first": -1.0}}
    settings = {"trainer": TRAINER, "orchestrator": {"advantage": kind}}

    def with_component(line):
        return {**line, "components": {"first": line["reward"]}}

    right = Made(settings=settings, line=with_component)
    assert "advantages_misplaced" in named(make(tmp_path / "wrong", right))
    assert "advantage_sign" not in named(tmp_path / "wrong")


@pytest.mark.parametrize("shown", ["as sampled", "of another"])
def test_tokens_of_another_reply_of_the_same_length_are_named(tmp_path, shown):
    others = iter("abc" for _ in range(10_000))

    def recorded(line):
        asked, said = line["messages"]
        content = said["content"] if shown == "as sampled" else next(others)
        return {**line, "messages": [asked, {**said, "content": content}]}

    run = make(tmp_path / "run", Made(line=recorded))
    assert ("advantages_misplaced" in named(with_tokenizer(run))) == (shown == "of another")


def test_rollout_without_room_for_a_second_reply_is_not_a_fault(tmp_path):
    def without_room(line):
        return {**line, "messages": [*line["messages"], {"role": "user", "content": "x" * 100}]}

    run = make(tmp_path / "run", Made(line=without_room))
    assert "advantages_misplaced" not in named(with_tokenizer(run))


def test_a_policy_that_learned_to_be_silent_is_named(tmp_path):
    run = with_metrics(make(tmp_path / "run", Made(steps=14, line=of_silence)), rising)
    assert "settled_below_best" in named(run)


def test_noise_that_normalization_makes_large_is_named(tmp_path):
    """Rewards of one task differ by 1, and those of the others by some 0.0001."""
    made = Made(
        reward=lambda word, task, rng: float(word[0] < 2) if task == 0 else 1e-4 * word[0],
        advantages=lambda advantages, rng: advantages / (advantages.std() + 1e-8),
        settings={"orchestrator": {"advantage": {"type": "group", "std_norm": "local"}}},
    )
    run = make(tmp_path / "run", made)
    for path in (run / "rollouts").glob("step_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for group in {line["group"] for line in lines}:
            ours = [line for line in lines if line["group"] == group]
            rewards = np.array([line["reward"] for line in ours])
            for line, advantage in zip(
                ours, (rewards - rewards.mean()) / (rewards.std() + 1e-8), strict=True
            ):
                line["advantages"] = [float(advantage)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert named(run) == ["noise_normalized"]


def test_some_replies_with_random_rewards_are_named_in_a_run_that_does_not_learn(tmp_path):
    run = make(tmp_path / "run", Made(reward=sometimes_other, steps=24, groups=16))
    assert named(run)[0] == "grader_random"


def test_stale_weights_are_named_in_an_asynchronous_run(tmp_path):
    made = Made(level=1, steps=14, drift=0.2, sampler=lambda tables, version, number: tables[0])
    assert named(make(tmp_path / "run", made))[0] == "stale_weights"


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_old_tokens_that_updates_do_not_explain_are_named(tmp_path, wrong):
    made = Made(
        level=1, steps=14, sampler=lambda tables, version, number: tables[version] * (1 + wrong * version)
    )
    run = with_metrics(
        make(tmp_path / "run", made), lambda step: {"trainer": {"update/logprob_change": 0.06}}
    )
    assert ("mismatch_after_updates" in named(run)) == (wrong > 0)


def test_a_gap_after_the_last_measured_update_may_be_a_larger_update(tmp_path):
    made = Made(
        level=1,
        steps=14,
        sampler=lambda tables, version, number: tables[version] * (1 + max(0, version - 8)),
    )
    run = with_metrics(
        make(tmp_path / "run", made),
        lambda step: {"trainer": {"update/logprob_change": 0.06}} if step in (0, 1, 3, 7) else {},
    )
    assert "mismatch_after_updates" not in named(run)


@pytest.mark.parametrize("version", [0, 13])
def test_evaluations_of_old_weights_are_named(tmp_path, version):
    run = with_evaluations(make(tmp_path / "run", FLAT), {0: (0.1, 0.3) * 6, 13: (0.1, 0.3) * 6})
    for step, oldest in ((0, 0), (13, version)):
        path = run / "evals" / f"step_{step}" / "made.jsonl"
        lines = [{**json.loads(line), "oldest_version": oldest} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ("stale_evaluations" in named(run)) == (version == 0)


@pytest.mark.parametrize("best", [0.5, 1.0])
def test_replies_that_are_all_cut_are_named_if_they_cannot_get_the_best_reward(tmp_path, best):
    def cut(line):
        return {**line, "truncated": True, "reward": best, "shaped_reward": best, "components": {}}

    found = diagnose(make(tmp_path / "run", Made(line=cut, reward=graded))).findings
    (truncated,) = (finding for finding in found if finding.name == "truncated")
    assert (truncated.confidence == "likely") == (best < 1.0)


def test_answers_only_in_training_prompts_are_named(tmp_path):
    def shown(line):
        said = line["messages"][-1]["content"] if line["reward"] else "zzz"
        asked = {"role": "user", "content": f"{line['task_id']} {said}"}
        return {**line, "messages": [asked, line["messages"][-1]], "text": [f"{asked['content']} x"]}

    run = make(tmp_path / "run", Made(line=shown, tasks=200, steps=14))
    folder = run / "evals" / "step_0"
    folder.mkdir(parents=True)
    messages = [{"role": "user", "content": "another task"}, {"role": "assistant", "content": "abc"}]
    lines = (
        {"task_id": f"eval-{task}", "rollout": 0, "reward": 0.5, "messages": messages} for task in range(20)
    )
    (folder / "made.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = (finding for finding in diagnose(run).findings if finding.name == "answer_in_prompt")
    assert found.confidence == "likely"


def test_a_component_that_is_lost_is_named(tmp_path):
    found = named(with_metrics(make(tmp_path / "run", replace(FLAT, line=of_two_components)), rising))
    assert found[0] == "component_outweighed"


@pytest.mark.parametrize("tasks", [2, 30])
def test_few_tasks_are_named_if_the_evaluation_does_not_follow(tmp_path, tasks):
    run = with_metrics(make(tmp_path / "run", replace(FLAT, tasks=tasks)), rising)
    with_evaluations(run, {0: (0.3, 0.2) * 6, 13: (0.2, 0.3) * 6})
    assert ("few_tasks" in named(run)) == (tasks == 2)


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named_first(tmp_path, name):
    found = diagnose(make(tmp_path / "run", PLANTED[name])).findings
    assert found[0].name == name
    assert found[0].confidence != "possible"
    assert found[0].evidence
    assert all(str(tmp_path) in evidence.command for evidence in found[0].evidence)


def test_a_run_as_it_was_knows_nothing_of_what_came_later(tmp_path):
    run = make(tmp_path / "run", PLANTED["evaluated_on_train"])
    (run / "evals" / "step_0").rename(run / "evals" / "step_3")
    write_event(run, "failure", attempt=1, cause="the disk is full")
    assert named(run) == ["failed", "evaluated_on_train"]
    assert named(run, step=2) == []
    assert named(run, step=3) == ["evaluated_on_train"]


@pytest.mark.parametrize("seed", range(1))
def test_a_run_that_is_right_is_not_accused(tmp_path, seed):
    usual = Made(seed=seed)
    for name, one in {
        "usual": usual,
        "asynchronous": replace(usual, level=1),
        "bfloat16 engine": replace(usual, noise=0.02, dtype="bfloat16"),
    }.items():
        assert (name, named(make(tmp_path / name, one))) == (name, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_that_of_the_recorded_dtype(tmp_path, dtype):
    one = Made(noise=0.07, dtype=dtype, settings={"trainer": {"model": {"dtype": "auto", "device": "cpu"}}})
    assert ("mismatch_from_the_start" in named(make(tmp_path / "run", one))) == (dtype == "float32")


def test_a_notebook_shows_the_chain(tmp_path):
    done = diagnose(make(tmp_path / "run", PLANTED["equal_seeds"]))
    assert repr(done) == str(done)
    assert "First broken link: equal_seeds" in repr(done)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-6, 1e-4, 0.02])
def test_hundreds_of_runs_that_are_right_are_not_accused(tmp_path, noise):
    dtype = "float32" if noise < 0.01 else "bfloat16"
    for seed in range(150):
        one = Made(seed=seed, noise=noise, level=seed % 3, size=2 + seed % 7, drift=0.02 * (1 + seed % 4))
        assert (seed, named(make(tmp_path / str(seed), replace(one, dtype=dtype)))) == (seed, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_it_is_named_whatever_the_seed(tmp_path, name):
    for seed in range(20):
        found = diagnose(make(tmp_path / str(seed), replace(PLANTED[name], seed=seed))).findings
        assert (seed, found[0].name) == (seed, name)


def test_intervals():
    """Wilson's interval of 5 of 10 at two errors, by hand: 0.5 +- 2 / 1.4 sqrt(0.025 + 0.01)."""
    assert share_interval(5, 10, 2.0) == pytest.approx((0.5 - 0.26726, 0.5 + 0.26726), abs=1e-4)
    low, high = slope_interval(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    assert (low, high) == pytest.approx((2.0, 2.0))
