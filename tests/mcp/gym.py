"""Configurations and mappings of the environments of the tests, and any values."""

from hypothesis import strategies as st

from buckeye.mcp.config import GymConfig

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)


def json_values(names, leaves=5):
    """Values of JSON, whose objects have some of the names."""
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=leaves,
    )


def mapping(tool, *names):
    """The mapping of an action to a tool that takes these arguments."""
    return {
        "_tool": tool,
        "_parser": {"positional": list(names)},
        **{name: {"from_arg": name} for name in names},
    }


def gym_config(actions, **fields):
    """A configuration in which only what a task is graded with counts."""
    given = {
        "system_prompt": "Call tools.",
        "parser": {"use_thinking": False},
        "action_mappings": actions,
        "rubric": {"weights": {"task_completion": 1.0}},
    }
    return GymConfig.model_validate(given | fields)
