"""Choice of the environment of each group."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from buckeye.orchestrator.task_sampler import EnvironmentMix


def dealt(mix, count):
    return [mix[i] for i in range(count)]


def environments(mix, count):
    return "".join("ABC"[environment] for environment, _, _ in dealt(mix, count))


@given(
    ratios=st.lists(st.floats(0.01, 100), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    count=st.integers(1, 60),
)
def test_every_stretch_from_the_start_is_as_close_to_the_shares_as_whole_numbers_allow(ratios, sizes, count):
    counts = Counter(
        environment for environment, _, _ in dealt(EnvironmentMix(ratios, sizes[: len(ratios)]), count)
    )
    for i, ratio in enumerate(ratios):
        assert counts[i] - ratio / sum(ratios) * count < 1.0 + 1e-6


def test_mix_with_extreme_ratios_uses_every_environment():
    mix = EnvironmentMix([1e-3, 1.0], [3, 3])
    assert environments(mix, 2002).count("A") == 2
    assert environments(EnvironmentMix([1e300, 1e300], [1, 1]), 4) in ("ABAB", "BABA")


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), count=st.integers(1, 50))
def test_every_task_of_an_epoch_is_assigned_once(sizes, count):
    mix = EnvironmentMix([1.0] * len(sizes), sizes)
    seen = Counter(dealt(mix, count))
    assert max(seen.values()) == 1
    for environment, size in enumerate(sizes):
        own = [d for d in dealt(mix, count) if d[0] == environment]
        assert own == [(environment, *divmod(n, size)) for n in range(len(own))]


def test_assignment_depends_only_on_the_group_index():
    def new():
        return EnvironmentMix([2, 1], [3, 4])

    assert new()[17] == dealt(new(), 18)[17]
