"""Outcomes that an environment may return for a rollout."""

import ast
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.envs.stdlib_only.outcomes import OutcomeError, checked_outcome, describe_frame, failure, shorten
from buckeye.workers import worker_side

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["reward", "components", "explanations", "stop_reason", "error", "turn_rewards", "handle"]


@given(ANYTHING | st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, ANYTHING)))
def test_any_value_is_an_outcome_or_refused(value):
    try:
        outcome = checked_outcome(value)
    except OutcomeError:
        return
    assert sorted(outcome) == sorted(KEYS)
    assert checked_outcome(outcome) == outcome
    if outcome["reward"] is None:
        assert outcome["error"] is not None or outcome["handle"] is not None
    else:
        assert outcome["error"] is None
        assert math.isfinite(outcome["reward"])


@pytest.mark.parametrize(("given", "reward"), [(1, 1.0), (True, 1.0), (0.25, 0.25), (Fraction(1, 4), 0.25)])
def test_every_kind_of_finite_number_is_a_reward(given, reward):
    assert checked_outcome({"reward": given})["reward"] == reward


def test_outcome_with_error_and_reward_has_no_reward():
    error = {"boundary": "score", "type": "E", "message": "not graded"}
    assert checked_outcome({"reward": 1.0, "error": error})["reward"] is None


def test_shortened_message_has_the_original_length():
    assert shorten("x" * 4000) == "x" * 4000
    assert shorten("x" * 4001) == "x" * 4000 + "... (4001 characters in all)"
    assert shorten(shorten("x" * 4001)) == shorten("x" * 4001)
    assert len(failure("step", "E" * 999, "x" * 10**6)["type"]) == 200


def test_a_frame_between_two_lines_has_none():
    assert describe_frame("made.py", None, "rollout") == "made.py:? in rollout: "


def test_worker_side_is_python_3_10_without_buckeye_imports():
    for path in Path(worker_side.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(), str(path), feature_version=(3, 10))
        imported = [
            node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level
        ]
        imported += [
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        ]
        assert not [name for name in imported if str(name).partition(".")[0] == "buckeye"], path
