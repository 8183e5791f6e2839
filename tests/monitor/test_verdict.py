"""A check whose counts show a problem is never reported as passed."""

import logging

import pytest

from buckeye.monitor.log import SUCCESS
from buckeye.monitor.verdicts import rollouts_log_level, training_log_level, verdict


@pytest.mark.parametrize(
    ("tried", "bad", "word"),
    [
        (0, 0, "not tried"),
        (1, 0, "passed"),
        (1, 1, "failed"),
        (1778, 1778, "failed"),
        (10, 9, "failed"),
        (10, 8, "partly"),
        (1000, 1, "partly"),
    ],
)
def test_the_word_follows_from_the_counts(tried, bad, word):
    assert verdict(tried, bad) == word


@pytest.mark.parametrize(("tried", "bad"), [(0, 1), (3, 4), (3, -1), (-1, 0)])
def test_impossible_counts_are_refused(tried, bad):
    with pytest.raises(ValueError, match=f"{bad} .* {tried}"):
        verdict(tried, bad)


@pytest.mark.parametrize(
    ("played", "errored", "truncated", "level"),
    [
        (64, 0, 0, SUCCESS),
        (64, 32, 16, SUCCESS),
        (64, 0, 64, logging.WARNING),
        (64, 32, 32, logging.WARNING),
        (1778, 1778, 0, logging.ERROR),
        (0, 0, 0, logging.ERROR),
    ],
)
def test_rollouts_that_came_to_nothing_are_no_success(played, errored, truncated, level):
    assert rollouts_log_level(played, errored=errored, truncated=truncated) == level


@pytest.mark.parametrize(
    ("tried", "left_out", "level"),
    [(64, 0, SUCCESS), (64, 32, SUCCESS), (64, 64, logging.WARNING), (0, 0, logging.WARNING)],
)
def test_training_that_learned_from_nothing_is_no_success(tried, left_out, level):
    assert training_log_level(tried, left_out=left_out) == level
