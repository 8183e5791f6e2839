"""Means and their intervals compared with hand-computed numbers.

tests/benchmarks/test_intervals.py measures their coverage.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.monitor.intervals import (
    cluster_of,
    mean_over_tasks,
    paired_difference,
    pass_at_k,
    student_quantile,
    wilson_interval,
)

SHARES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def each_by_itself(n):
    return list(range(n))


def test_pass_at_k_is_unbiased():
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - 3 / 6)  # 3 of the 6 pairs have no success
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(4, 4, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_of_what_cannot_be(n, passed, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, passed, k)


def test_wilson_interval():
    low, high = wilson_interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))


def test_tasks_about_one_word_are_one_cluster():
    assert cluster_of("t1", {}) != cluster_of("t2", {"lemma_ids": []})
    assert cluster_of("t1", {"lemma_ids": ["kaška"]}) == cluster_of("t2", {"lemma_ids": ("kaška", "koda")})
    assert cluster_of("t1", {"lemma_ids": ["koda", "kaška"]}) == "koda"


def test_many_clusters_of_one_task_are_close_to_a_binomial():
    got = mean_over_tasks([1.0] * 50 + [0.0] * 50, each_by_itself(100))
    assert (got.value, got.n, got.clusters) == (0.5, 100, 100)
    assert got.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015)
    assert got.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)


def test_the_same_answer_four_times_is_worth_as_much_as_once():
    once = mean_over_tasks([1.0] * 20 + [0.0] * 20, each_by_itself(40))
    again = mean_over_tasks([1.0] * 80 + [0.0] * 80, [i // 4 for i in range(160)])
    assert (again.low, again.high) == (once.low, once.high)
    independent = mean_over_tasks([1.0] * 80 + [0.0] * 80, each_by_itself(160))
    assert again.high - again.low > 1.6 * (independent.high - independent.low)


def test_one_cluster_says_next_to_nothing():
    got = mean_over_tasks([1.0] * 25 + [0.0] * 25, [0] * 50)
    assert (got.n, got.clusters) == (50, 1)
    assert got.low < 0.06
    assert got.high > 0.94


def test_none_and_all_solved_have_the_wilson_interval_of_the_clusters():
    none = mean_over_tasks([0.0] * 30, [i // 3 for i in range(30)])
    assert (none.low, none.high) == (0.0, pytest.approx(0.2775, abs=1e-4))
    every = mean_over_tasks([1.0] * 30, [i // 3 for i in range(30)])
    assert (every.low, every.high) == (pytest.approx(1 - 0.2775, abs=1e-4), 1.0)


def test_no_change_among_few_is_not_certainly_no_change():
    got = paired_difference([0.0] * 10, [0.0] * 10, each_by_itself(10))
    assert (got.value, got.low, got.high) == (
        0.0,
        pytest.approx(-0.2775, abs=1e-4),
        pytest.approx(0.2775, abs=1e-4),
    )


def test_four_changes_in_one_direction_are_not_enough_and_ten_are():
    before = [0.0] * 20
    four = paired_difference(before, [1.0] * 4 + [0.0] * 16, each_by_itself(20))
    assert four.value == pytest.approx(0.2)
    assert four.low < 0 < four.high
    ten = paired_difference(before, [1.0] * 10 + [0.0] * 10, each_by_itself(20))
    assert ten.low > 0.2


def test_no_change_is_surer_than_two_shares_that_happen_to_be_equal():
    half = [1.0] * 10 + [0.0] * 10
    got = paired_difference(half, half, each_by_itself(20))
    alone = wilson_interval(0, 20)[1]
    assert (got.low, got.high) == (pytest.approx(-alone), pytest.approx(alone))


def test_pairs_are_compared_with_themselves():
    # Half are solved before; afterwards these and ten more. Unpaired intervals would overlap by far.
    before = [1.0] * 50 + [0.0] * 50
    after = [1.0] * 60 + [0.0] * 40
    got = paired_difference(before, after, each_by_itself(100))
    assert got.value == pytest.approx(0.1)
    assert got.low > 0
    old, new = mean_over_tasks(before, each_by_itself(100)), mean_over_tasks(after, each_by_itself(100))
    assert old.high > new.low


def test_student_quantile():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 6: 2.447, 9: 2.262, 31: 2.040, 99: 1.984}  # from any textbook
    assert {v: student_quantile(v) for v in table} == pytest.approx(table, rel=2e-3)


def test_the_score_interval_has_as_many_observations_as_the_variance_says():
    # Six of ten solved: the variance of the mean is 0.24 / 9, as of 9 observations; t with 9 degrees 2.2622;
    # center (0.6 + 5.1175/18) / (1 + 5.1175/9) = 0.5637, half 2.2622 sqrt(0.24/9 + 5.1175/324) / 1.5686 =
    # 0.2972
    got = mean_over_tasks([1.0] * 6 + [0.0] * 4, each_by_itself(10))
    assert (got.low, got.high) == (pytest.approx(0.2665, abs=2e-4), pytest.approx(0.8609, abs=2e-4))


def test_rewards_without_skewness_have_the_t_interval():
    # Deviation sqrt(10 / 4) = 1.5811, t with 4 degrees 2.7764: 12 +- 2.7764 * 1.5811 / sqrt(5)
    got = mean_over_tasks([10.0, 11.0, 12.0, 13.0, 14.0], each_by_itself(5))
    assert got.value == 12.0
    assert got.high == pytest.approx(12 + 1.9632, abs=2e-3)
    assert got.low <= 12 - 1.9632 + 2e-3  # the score interval on the scale from 0 to 14 extends further down


def test_a_long_tail_widens_the_interval_on_its_side():
    # Mean 2, deviation sqrt(20 / 4) = 2.2361, skewness 5 / 12 * (64 - 4) / 2.2361^3 = 2.2361; inverted, t =
    # -2.7764 is 3 / 2.2361 (cbrt(1 + 2.2361 (-2.7764 / sqrt(5) - 2.2361 / 30)) - 1) = -3.0158
    got = mean_over_tasks([1.0, 1.0, 1.0, 1.0, 6.0], each_by_itself(5))
    assert got.high == pytest.approx(2 + 2.2361 * 3.0158, abs=0.01)
    assert got.high - got.value > 3 * (got.value - got.low)


def test_rewards_of_both_signs_are_about_their_own_scale():
    solved = mean_over_tasks([1.0] * 6 + [0.0] * 4, each_by_itself(10))
    signed = mean_over_tasks([1.0] * 6 + [-1.0] * 4, each_by_itself(10))
    assert (signed.low, signed.high) == pytest.approx((2 * solved.low - 1, 2 * solved.high - 1))


def test_equal_rewards_are_no_certainty():
    got = mean_over_tasks([0.2] * 7, each_by_itself(7))
    assert (got.low, got.high) == pytest.approx(wilson_interval(0.2 * 7, 7))


@given(st.lists(st.tuples(st.floats(-1e30, 1e30), st.integers(0, 12)), min_size=1, max_size=40))
def test_an_interval_of_whatever_holds_its_value(drawn):
    values, clusters = zip(*drawn, strict=True)
    got = mean_over_tasks(values, clusters)
    assert got.low <= got.value <= got.high


@given(st.lists(st.tuples(SHARES, st.integers(0, 12)), min_size=1, max_size=40))
def test_an_interval_holds_its_value(drawn):
    values, clusters = zip(*drawn, strict=True)
    got = mean_over_tasks(values, clusters)
    assert 0.0 <= got.low <= got.value + 1e-12
    assert got.value - 1e-12 <= got.high <= 1.0
    assert got.clusters == len(set(clusters))
    assert got == mean_over_tasks(values, clusters)


@given(st.lists(st.tuples(SHARES, SHARES, st.integers(0, 12)), min_size=1, max_size=40))
def test_a_change_the_other_way_round_is_its_mirror_image(drawn):
    before, after, clusters = zip(*drawn, strict=True)
    there = paired_difference(before, after, clusters)
    back = paired_difference(after, before, clusters)
    assert (back.value, back.low, back.high) == pytest.approx(
        (-there.value, -there.high, -there.low), abs=1e-9
    )
    assert there.low <= there.value + 1e-12
    assert there.value - 1e-12 <= there.high


def test_nothing_has_no_mean_over_tasks():
    with pytest.raises(ValueError, match="no values"):
        mean_over_tasks([], [])
