"""Games of several players with one trained player, in a library that the tests know."""

import asyncio
import random

import pytest
from tests.inference.chat_families import save_family
from tests.workers.adapters.fake_textarena import install
from tests.workers.proxy.players import scripted

from buckeye.inference.render import ChatRenderer
from buckeye.workers.proxy import Limits, serve
from buckeye.workers.worker_side.adapters.base import AdapterError
from buckeye.workers.worker_side.adapters.textarena import TextArena


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(save_family("qwen2.5", tmp_path_factory.mktemp("qwen2.5")))


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    install(monkeypatch)


def play(policy, game="Race-v0", *, limits=None, **args):
    """Return the outcome of the first task, and the usage that the server counted."""

    async def run():
        adapter = TextArena(f"textarena/{game}", {"num_tasks": 1, **args})
        (task,) = adapter.tasks("train")
        async with serve(policy, limits=limits or Limits()) as endpoint:
            address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": "policy"}
            return await adapter.rollout(task, address, {}), endpoint.usage

    return asyncio.run(run())


def sampled(policy, renderer):
    """Return the texts of the trained tokens."""
    return [
        renderer.decode([t for t, mask in zip(s.token_ids.tolist(), s.loss_mask, strict=True) if mask])
        for s in policy.segments
    ]


SELF = {"opponent": "self"}


@pytest.mark.parametrize(
    ("game", "args"),
    [
        ("Race-v0", {}),
        ("Race-v0", {"seat": 0}),
        ("Race-v0", {"seat": 2, **SELF}),
        ("Race-v0", {"seat": True, **SELF}),
        ("Race-v0", {"seat": "Wite", **SELF}),
        ("Race-v0", {"seat": 0, "opponent": "selv"}),
        ("Race-v0", {"seat": 0, "opponent": "random", "shows_moves": False}),
        ("Words-v0", {}),
        ("Sums-v0", {}),
        ("Broken-v0", {}),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_at_load(game, args, refusal):
    with refusal(AdapterError):
        TextArena(f"textarena/{game}", args)


def test_against_itself_only_the_seat_is_trained_and_counted(renderer):
    """White says 2, Black 1, White 2: White has brought the sum to 5 and Black has lost."""
    policy, engine = scripted(renderer, ["[2]", "[1]", "[2]"])
    outcome, usage = play(policy, seat=0, opponent="self", limits=Limits(max_turns=1, max_tokens=40))
    assert (outcome["reward"], outcome["error"], outcome["stop_reason"]) == (0.0, None, "game_over")
    assert outcome["components"] == {
        "game_reward": -1.0,
        "turns": 1,
        "illegal_move": 0.0,
        "opponent_illegal_move": 0.0,
    }
    assert sampled(policy, renderer) == ["[1]" + renderer.decode([engine.answers[1][-1]])]
    assert (policy.turns, policy.replies, policy.completion_tokens) == (1, ["[1]"], len(engine.answers[1]))
    assert [message["role"] for message in policy.messages] == ["system", "user", "assistant"]
    assert policy.messages[1]["content"] == "Say [1] or [2]: five wins.\n\n[White] [2]"
    assert (usage.calls, usage.turns, usage.completion_tokens, usage.dropped) == (
        3,
        1,
        len(engine.answers[1]),
        {},
    )
    second = renderer.decode(engine.prompts[2])
    assert second.index("[2]") < second.index("[Black] [1]"), "White hears Black in its own conversation"


def test_reward_depends_on_the_trained_seat(renderer):
    policy, engine = scripted(renderer, ["[2]", "[1]", "[2]"])
    outcome, _ = play(policy, seat=1, opponent="self")
    assert (outcome["reward"], outcome["components"]["turns"]) == (1.0, 2)
    assert sampled(policy, renderer) == [renderer.decode(engine.answers[0] + engine.answers[2])]


def test_win_by_illegal_move_of_the_opponent_is_a_component(renderer):
    policy, _ = scripted(renderer, ["[2]", "[1]", "[7]", "[8]"])
    outcome, _ = play(policy, seat=0, opponent="self")
    assert (outcome["reward"], outcome["stop_reason"]) == (1.0, "game_over")
    assert outcome["components"]["opponent_illegal_move"] == 1.0


def test_a_game_that_is_over_before_the_seat_has_a_turn_is_no_reward(renderer):
    policy, _ = scripted(renderer, ["[7]", "[8]"])
    outcome, _ = play(policy, seat=0, opponent="self")
    assert outcome["reward"] is None
    assert policy.segments == []


def test_random_opponent_makes_legal_moves(renderer):
    """It moves by the task's seed: the same in every rollout of a task, but not in every task."""
    games = set()
    for seed in range(6):
        heard = []
        for _ in range(2):
            policy, _ = scripted(renderer, ["[1]"] * 5)
            outcome, usage = play(policy, seat=0, opponent="random", seed=seed)
            assert outcome["error"] is None
            assert outcome["components"]["opponent_illegal_move"] == 0.0
            assert outcome["components"]["turns"] == usage.calls == policy.turns
            heard.append([message["content"] for message in policy.messages])
        assert heard[0] == heard[1]
        games.add(str(heard[0]))
    assert len(games) > 1


def test_shared_random_state_is_unchanged():
    random.seed(3)
    wanted = random.Random(3).random()
    TextArena("textarena/Race-v0", {"seat": 0, "opponent": "random"})
    assert random.random() == wanted
