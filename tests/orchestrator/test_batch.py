"""Groups become samples, metrics and records of rollouts."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.monitor.rollouts import read_rollouts, rollouts_file
from buckeye.orchestrator.batch import (
    advantages_of,
    batch_metrics,
    make_batch,
    prune_rollouts,
    write_rollouts,
)

from .made_rollouts import group, rollout


def advantages(*groups, **settings):
    config = OrchestratorConfig(**settings)
    batch = make_batch(2, groups, advantages_of(groups, config), config, state={})
    return [sample.advantages.tolist() for sample in batch.samples]


def test_every_sampled_token_carries_the_rollout_s_advantage():
    got = advantages(group(rollout(1.0, turns=(2, 1)), rollout(0.0, turns=(1,))))
    assert got == [[0.0, 0.5, 0.5, 0.0, 0.5], [0.0, -0.5]]


def test_every_sampled_token_carries_the_advantage_of_its_turn():
    first = rollout(1.0, turns=(2, 1), turn_rewards=[0.75, 0.25])  # returns 1.0, 0.25
    second = rollout(0.5, turns=(1, 1), turn_rewards=[0.5, 0.0])  # returns 0.5, 0.0
    got = advantages(group(first, second), advantage={"type": "turn"})
    assert got == [[0.0, 0.25, 0.25, 0.0, 0.125], [0.0, -0.25, 0.0, -0.125]]


def test_advantages_are_of_the_shaped_reward():
    got = advantages(group(rollout(1.0, turns=(1,)), rollout(1.0, turns=(1,), shaping={"length": -0.5})))
    assert got == [[0.0, 0.25], [0.0, -0.25]]


def test_an_errored_rollout_is_no_sample_and_not_in_the_mean():
    got = advantages(group(rollout(1.0, turns=(1,)), rollout(None), rollout(0.0, turns=(1,))))
    assert got == [[0.0, 0.5], [0.0, -0.5]]


def test_masked_truncated_rollouts_are_not_trained_on_but_are_compared_with():
    played = group(rollout(1.0), rollout(0.0, truncated=True))
    config = OrchestratorConfig(mask_truncated_completions=True)
    whole, cut = make_batch(2, [played], advantages_of([played], config), config, state={}).samples
    assert whole.loss_mask.tolist() == [False, True, True, True]
    assert whole.advantages.tolist() == [0.0, 0.5, 0.5, 0.5]
    assert not cut.loss_mask.any()
    assert cut.token_ids.tolist() == [7, 5, 5, 5]
    assert not cut.advantages.any()
    assert not cut.logprobs.any()
    assert cut.versions.tolist() == [-1] * 4
    config = OrchestratorConfig()
    kept = make_batch(2, [played], advantages_of([played], config), config, state={}).samples[1]
    assert kept.loss_mask.sum() == 3
    assert kept.advantages.dtype == np.float32


def test_raw_and_shaped_rewards_are_both_in_the_figures():
    played = group(
        rollout(1.0, shaping={"overlong": -0.5, "stop_reason": 0.0}),
        rollout(0.0, shaping={"overlong": 0.0, "stop_reason": 0.0}, stop_reason="turn_limit"),
    )
    metrics = batch_metrics(2, [played], OrchestratorConfig())
    assert metrics["reward/mean"] == metrics["reward/letters"] == 0.5
    assert metrics["shaped_reward/mean"] == 0.25
    assert metrics["shaped_reward/std"] == 0.25
    assert metrics["reward_shaping/overlong/mean"] == -0.25
    assert metrics["reward_shaping/overlong/share"] == 0.5
    assert metrics["reward_shaping/stop_reason/share"] == 0.0
    assert metrics["stop_reason/answered"] == metrics["stop_reason/turn_limit"] == 0.5
    unshaped = batch_metrics(2, [group(rollout(1.0), rollout(0.0))], OrchestratorConfig())
    assert not [name for name in unshaped if "shap" in name]


def test_the_record_has_raw_and_shaped_rewards(tmp_path):
    shaped = rollout(1.0, turns=(1, 1), turn_rewards=(0.25, 0.75), shaping={"length": -0.5})
    groups = [(None, group(shaped, rollout(None))), ("errored", group(rollout(None)))]
    asyncio.run(write_rollouts(tmp_path / "step_2.jsonl", groups, lambda ids: "text"))
    good, errored, dropped = map(json.loads, (tmp_path / "step_2.jsonl").read_text().splitlines())
    assert [one["dropped"] for one in (good, errored, dropped)] == [None, None, "errored"]
    assert good["reward"] == 1.0
    assert good["shaped_reward"] == pytest.approx(0.5)
    assert good["shaping"] == {"length": -0.5}
    assert good["turn_rewards"] == [0.25, 0.75]
    assert (errored["reward"], errored["shaped_reward"], errored["turn_rewards"]) == (None, None, [])


def test_written_batch_can_be_read(tmp_path):
    path = tmp_path / "rollouts" / rollouts_file(2)
    played = [(None, group(rollout(1.0, turn_rewards=(1,)), rollout(None), index=4))]
    asyncio.run(write_rollouts(path, played, lambda ids: "text"))
    (good, errored), unreadable = read_rollouts(tmp_path, 2)
    assert [(one.number, one.group, one.reward, one.error) for one in (good, errored)] == [
        (0, 4, 1.0, None),
        (1, 4, None, "it broke"),
    ]
    assert unreadable == 0
    line = json.loads(path.read_text().splitlines()[0])
    assert msgspec.to_builtins(good) == {**line, "number": 0}
    path.write_text(f"{json.dumps(line)}\n{json.dumps({**line, chr(0xD800): 1})}\n")
    good, unreadable = read_rollouts(tmp_path, 2)
    assert (len(good), unreadable) == (2, 0)


def test_the_record_has_the_advantages_that_are_trained_with_and_the_messages(tmp_path):
    messages = ({"role": "user", "content": "say a"}, {"role": "assistant", "content": "a", "at": Path("/a")})
    good = replace(rollout(1.0, turns=(1, 2)), messages=messages)
    groups = [group(good, rollout(None), rollout(0.0)), group(rollout(0.5), rollout(0.5), index=1)]
    config, path = OrchestratorConfig(), tmp_path / "rollouts" / rollouts_file(2)
    advantages = advantages_of(groups, config)
    asyncio.run(write_rollouts(path, [(None, one) for one in groups], lambda ids: "text", advantages))
    dropped = tmp_path / "rollouts" / rollouts_file(2, dropped=True)
    asyncio.run(write_rollouts(dropped, [("stale", group(rollout(1.0), index=2))], lambda ids: "text"))
    played, unreadable = read_rollouts(tmp_path, 2)
    assert unreadable == 0
    assert [one.advantages for one in played] == [[0.5, 0.5], None, [-0.5], [0.0], [0.0], None]
    assert played[0].messages == [messages[0], {**messages[1], "at": "/a"}]
    batch = make_batch(2, groups, advantages, config, state={})
    sampled = [sample.advantages[sample.loss_mask].tolist() for sample in batch.samples]
    assert sampled == [[0.5] * 3, [-0.5] * 3, [0.0] * 3, [0.0] * 3]


def test_only_the_newest_rollouts_are_kept(tmp_path):
    of_somebody = ("step_x.jsonl", "step_2.mine.jsonl", "notes")
    kept = ("step_9.jsonl", "step_9.dropped.jsonl", "step_10.jsonl")
    for name in (*kept, "step_1.jsonl", "step_2.jsonl", "step_2.dropped.jsonl", *of_somebody):
        (tmp_path / name).write_text("")
    prune_rollouts(tmp_path, 10, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *of_somebody}


def test_lone_surrogate_is_replaced_when_written(tmp_path):
    one = group(rollout(1.0, stop_reason="odd \ud800"))
    asyncio.run(write_rollouts(tmp_path / "step_2.jsonl", [(None, one)], lambda ids: "text \udfff"))
    (line,) = map(json.loads, (tmp_path / "step_2.jsonl").read_text().splitlines())
    assert (line["stop_reason"], line["text"][0]) == ("odd \ufffd", "text \ufffd")


def test_rewards_of_turns_without_room_go_to_the_last_sampled_turn():
    played = rollout(
        0.9375, turns=(1, 1, 1), turn_rewards=[0.5, 0.25, 0.125, 0.0625], shaping={"length": -1.0}
    )
    assert played.as_scored().turn_rewards == [0.5, 0.25, 0.125 + 0.0625 - 1.0]
    assert rollout(1.0, turns=(1, 1), shaping={"length": -1.0}).as_scored().turn_rewards == [0.0, 0.0]
    assert rollout(1.0, turns=()).as_scored().turn_rewards == []


def test_solve_all_and_solve_none_metrics():
    groups = [
        group(*map(rollout, rewards))
        for rewards in ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.7 + 0.2 + 0.1, 2.0))
    ]
    metrics = batch_metrics(2, groups, OrchestratorConfig())
    assert (metrics["batch/solve_all"], metrics["batch/solve_none"]) == (0.5, 0.25)
