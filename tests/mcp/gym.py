"""Configurations and mappings of the test environments, and random JSON values."""

from hypothesis import strategies as st

from buckeye.mcp.config import GymConfig

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)


def json_values(names, leaves=5):
    """Draw JSON values whose objects use some of the names."""
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=leaves,
    )


def mapping(tool, *names):
    """Return the mapping of an action to a tool with these arguments."""
    return {
        "_tool": tool,
        "_parser": {"positional": list(names)},
        **{name: {"from_arg": name} for name in names},
    }


def gym_config(actions, **fields):
    """Return a configuration in which only task completion counts."""
    given = {
        "system_prompt": "Call tools.",
        "parser": {"use_thinking": False},
        "action_mappings": actions,
        "rubric": {"weights": {"task_completion": 1.0}},
    }
    return GymConfig.model_validate(given | fields)
