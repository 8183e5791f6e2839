"""Built-in rewards of answers: right and wrong replies, and what they need of a dataset."""

import json

import pytest

from buckeye.dataset.built_in import find_code, is_built_in
from buckeye.dataset.environment import make_environment
from buckeye.dataset.prompts import make_prompts, rows_of_values
from buckeye.errors import UsageError
from tests.dataset.conftest import grade

SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


def environment_of(spec, *rows):
    prompts = make_prompts("rows", rows_of_values([{"prompt": "a", **row} for row in rows], "row"), [])
    return make_environment(prompts, [spec])


@pytest.mark.parametrize(
    ("spec", "answer", "right", "wrong"),
    [
        ("exact", "Paris", ["Paris", " Paris\n"], ["paris", "Paris.", ""]),
        ("exact", 12, ["12", "12.0"], ["13", "twelve", ""]),
        ("exact", False, ["false"], ["0", ""]),
        ("exact", ["4", "four"], ["4", "four"], ["4 four"]),
        ("contains", "Paris", ["It is paris."], ["It is Parisian.", ""]),
        ("contains", "C++ (11)", ["I use c++ (11)."], ["C++"]),
        ("contains", ["yes", "no"], ["No!"], ["Nobody knows"]),
        (
            "numeric",
            "so 6 * 12 = 72 #### 72",
            ["the answer is 72.", "1 + 71 = 72", "72.00"],
            ["71", "", "72 or 73"],
        ),
        ("numeric", 1200, ["1,200"], ["1.2"]),
        ("numeric", -0.5, ["x = -0.5"], ["0.5"]),
        ("math", "\\frac{1}{2}", ["$0.5$", "so \\boxed{1/2}"], ["$0.4$", "half"]),
        ("regex:^yes\\b", None, ["yes.", "yes"], ["Yes", "yesterday", "oh yes"]),
        ("json", None, ["{}", "3", "Here:\n```json\n[1]\n```"], ["{", "no"]),
    ],
)
def test_right_and_wrong_replies(spec, answer, right, wrong):
    environment = environment_of(spec, {"answer": answer})
    scores = [outcome.reward for outcome in grade(environment, *right, *wrong)]
    assert scores == [1.0] * len(right) + [0.0] * len(wrong)


def test_json_is_compared_with_a_schema(write):
    write("schema.json", json.dumps(SCHEMA))
    outcomes = grade(environment_of("json:schema.json", {}), '{"name": "a"}', '{"name": 1}', "{}", "[]")
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 0.0, 0.0]
    assert outcomes[1].explanations["json"]


def test_numbers_that_json_lacks_are_not_json(write):
    write("schema.json", json.dumps({"multipleOf": 0.5}))
    for spec in ("json", "json:schema.json"):
        outcomes = grade(environment_of(spec, {}), "1.5", "NaN", "-Infinity")
        assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 0.0]


def test_the_column_of_answers_may_be_named():
    row = {"answer": "1", "second": "2"}
    assert [o.reward for o in grade(environment_of("exact:second", row), "1", "2")] == [0.0, 1.0]
    assert [o.reward for o in grade(environment_of("math:second", row), "$1$", "$2$")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("exact", [{"answer": "1"}, {"answer": None}, {"answer": " "}, {"answer": []}]),
        ("numeric", [{"answer": "none"}, {"answer": True}, {"answer": float("nan")}, {"answer": 10**400}]),
        ("exact:gold", [{"answer": "1"}]),
        ("numeric", [{}]),
        ("regex", [{}]),
        ("regex:(", [{}]),
        ("code", [{"answer": "1"}]),
        ("code:cases", [{"tests": "1"}]),
        ("code", [{"tests": []}, {"tests": "def"}, {"tests": [3]}, {"tests": ["pass"] * 101}]),
        ("code", [{"tests": [{"input": [1], "output": "2"}]}, {"tests": {"inputs": ["1"], "outputs": []}}]),
        ("code", [{"test": "def check(f):\n    assert f() == 1\n"}]),
    ],
)
def test_a_dataset_without_what_a_reward_needs_is_refused(refusal, spec, rows):
    with refusal(UsageError) as caught:
        environment_of(spec, *rows)
    assert caught.value.code in ("BK-REWARD", "BK-DATA-FORMAT")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "BK-FILE-NOT-FOUND"),
        ("{", "BK-REWARD"),
        ('{"type": "objekt"}', "BK-REWARD"),
        ("3", "BK-REWARD"),
    ],
)
def test_a_wrong_schema_is_refused(write, refusal, text, code):
    if text is not None:
        write("schema.json", text)
    with refusal(UsageError) as caught:
        environment_of("json:schema.json", {})
    assert caught.value.code == code


def test_names_of_built_in_rewards_are_not_modules():
    for spec in ("exact", "math", "json", "json:schema.json", "math:column", "code:tests", "regex:a:b"):
        assert is_built_in(spec)
    for spec in ("exact.py", "math.py:f", "json_rewards:f", "rewards.py"):
        assert not is_built_in(spec)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\nthen\n```py\nx = 2\n```", "x = 2\n"),
        ("```Python\nx = 1\n```\nbetter:\n```Python\nx = 2\n```", "x = 2\n"),
        ("```\nx = 3\n```", "x = 3\n"),
        ("```python\nx = 4", "x = 4"),
    ],
)
def test_the_code_of_a_reply_is_its_last_fence(reply, code):
    assert find_code(reply) == code
