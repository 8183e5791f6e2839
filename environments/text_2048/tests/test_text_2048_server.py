"""The server as a process, with Buckeye's own client."""

import asyncio
import sys
from pathlib import Path

import pytest
import yaml

from buckeye.envs.base import Reply
from buckeye.mcp.client.session import SessionTimeouts, open_session
from buckeye.mcp.tasks.task_files import read_tasks
from buckeye.mcp.tasks.task_schema import StdioServer
from buckeye.workers.loading import load_environment

pytestmark = pytest.mark.e2e

HOME = Path(__file__).parent.parent
SERVER = StdioServer(command=sys.executable, args=["-m", "text_2048"])
DEADLINES = SessionTimeouts(start=60.0, call=60.0, close=5.0)


def play(*calls):
    async def run():
        async with open_session("text_2048", SERVER, timeouts=DEADLINES) as session:
            return [await session.call(name, arguments) for name, arguments in calls]

    return asyncio.run(run())


def setup(**arguments):
    return "setup", {"name": "board", **arguments}


def test_setup_takes_flat_and_nested_arguments(wording):
    """Setup flat and nested gives the same graded board; errors help the model."""
    move, early, flat, nested, illegal, unknown, graded = play(
        ("move", {"direction": "left"}),
        ("evaluate", {}),
        setup(seed=5, board_size=3),
        ("setup", {"name": "board", "arguments": {"seed": 5, "board_size": 3}}),
        ("move", {"direction": "sideways"}),
        ("evaluate", {"name": "best"}),
        ("evaluate", {"name": "max_number", "arguments": {"target": 8}}),
    )
    assert flat.text == nested.text
    assert len(flat.text.splitlines()) == 3
    assert flat.structured == {"done": False, "highest": flat.structured["highest"], "moves": 0, "score": 0}
    assert all(result.is_error for result in (move, early, illegal, unknown))
    assert [move.text, illegal.text] == wording
    assert graded.structured["reward"] == 0.0


def test_game_is_done_when_no_direction_moves(wording):
    """On a 2 x 2 board, soon no direction moves a tile."""
    directions = ["left"] * 4 + ["left", "up", "right", "down"] * 20
    results = play(setup(seed=1, board_size=2), *(("move", {"direction": d}) for d in directions))
    last = [result for result in results if not result.is_error][-1]
    assert last.structured["done"] is True
    assert last.text.endswith("Game over.")
    illegal = next(result for result in results if result.is_error)
    assert [illegal.text, results[-1].text] == wording


class Corner:
    """Policy that moves into a corner: the first of left, down, right, up not reported as illegal."""

    def __init__(self):
        self.boards = []

    async def chat(self, messages, *, tools=()):
        text = messages[-1]["content"]
        self.boards.append(text)
        moves = ["left", "down", "right", "up"]
        if "These directions can: " in text:
            legal = text.partition("These directions can: ")[2]
            moves = [move for move in moves if move in legal]
        reply = f'<tool>move("{moves[len(self.boards) % 2 if len(moves) > 1 else 0]}")</tool>'
        return Reply(text=reply, finish_reason="stop", message={"role": "assistant", "content": reply})


@pytest.fixture
def environment(tmp_path):
    """Environment of this folder's files."""
    return load_environment("mcp", dataset=str(HOME / "tasks.json"), config_path=str(HOME / "text_2048.yaml"))


def test_tasks_and_configuration_run_rollouts(environment):
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (16, 8)
    seeds = [task.data["seed"] for task in (*train, *held_out)]
    assert len(set(seeds)) == len(seeds)

    async def run():
        policies = [Corner(), Corner()]
        outcomes = await asyncio.gather(*(environment.rollout(train[0], policy) for policy in policies))
        return policies, outcomes

    (one, two), outcomes = asyncio.run(run())
    assert one.boards == two.boards  # a group shares its board
    assert one.boards[0].startswith("Play 2048.")
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.stop_reason in ("turn_limit", "environment_done")
        assert 0.2 < outcome.components["task_completion"] < 1.0
        assert outcome.components["moves"] > 20


def test_tasks_differ_only_by_seed():
    tasks = read_tasks(HOME / "tasks.json")
    assert {call.arguments["board_size"] for task in tasks for call in task.setup_tool} == {4}
    assert [t.setup_tool[0].arguments["seed"] for t in tasks] == [t.metadata["seed"] for t in tasks]
    mapped = yaml.safe_load((HOME / "text_2048.yaml").read_text())["action_mappings"]
    assert {action["_tool"] for action in mapped.values()} == {"move", None}
