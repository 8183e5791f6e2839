"""Settings of several environments: valid combinations and their effects."""

import pytest

from buckeye.config.load import load_with_warnings
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import UsageError
from buckeye.orchestrator.environments import default_environment_name, load_environments, worker_settings

TWO = "--env.0.id a --env.1.id b"


def given(load, words):
    return load(OrchestratorConfig, words)


def test_batch_size_needs_no_multiple_if_group_sizes_differ(load, refused):
    sizes = "--env.0.rollouts-per-example 4 --env.1.rollouts-per-example 7 --batch-size 25"
    assert given(load, f"{TWO} {sizes}").group_sizes == [4, 7]
    same = sizes.replace("7", "4")
    assert "to 24 or 28" in refused(OrchestratorConfig, f"{TWO} {same}")


@pytest.mark.parametrize(
    "words",
    [
        "--env.0.ratio 0",
        "--env.0.sampling.temperature 0",
        "--env.0.isolation none --env.0.max-turns 3",
        "--env.0.rollouts-per-example 3 --min-group-size 4 --batch-size 9 --rollouts-per-example 4",
        "--env.0.max-turn 3",
        "--max-async-level 0 --env.0.max-concurrent 3",
        "--max-async-level 1 --deterministic",
        "--max-async-level 0 --eval.env.0.max-concurrent 3",
        '--env.0.isolation none --env.0.variables ["A"]',
    ],
)
def test_conflicting_environment_settings_are_refused(refused, words, wording):
    assert refused(OrchestratorConfig, f"{TWO} {words}") == wording


def test_valid_environment_settings_give_no_warnings():
    words = f"""{TWO}
        --env.0.rollouts-per-example 4 --env.1.rollouts-per-example 8 --env.0.sampling.temperature 0.7
        --env.0.max-concurrent 4 --env.1.rate-limit 0.5 --env.0.rollout-timeout 30 --env.1.max-turns 4
        --env.1.max-memory-gb 2 --max-async-level 0 --deterministic false
        --env-pause.after-failures 3 --eval.env.0.max-concurrent 2"""
    assert load_with_warnings(OrchestratorConfig, words.split())[1] == []


def test_max_concurrent_in_lockstep_gives_a_warning(wording):
    words = "--max-async-level 0 --max-concurrent 3 --rollouts-per-example 8"
    (warning,) = load_with_warnings(OrchestratorConfig, words.split())[1]
    assert str(warning) == wording


def test_variables_are_names_and_errors_hide_values(load, refused, refusal, wording):
    env = given(load, '--env.0.id e --env.0.variables ["SEARCH_API_KEY","B2"]').env[0]
    settings = worker_settings(env, "e", 600.0, None)
    assert (settings.isolation, settings.variables) == ("process", ("SEARCH_API_KEY", "B2"))
    with refusal(UsageError):
        load_environments([env.model_copy(update={"name": "e"})])
    message = refused(OrchestratorConfig, '--env.0.variables ["A","SEARCH_API_KEY=sesame"]')
    assert message == wording
    assert "sesame" not in message


def test_evaluation_without_environments_uses_those_of_the_run(load):
    words = "--env.0.id a --env.0.args.level 3 --env.0.ratio 2 --env.0.rollouts-per-example 4 --env.1.id b"
    words += " --env.1.sampling.temperature 0.5 --env.1.sampling.max-tokens 9 --batch-size 8"
    assert given(load, words).evaluation_environments == []
    first, second = given(load, f"{words} --eval.interval 2").evaluation_environments
    assert (first.id, first.args, first.split, first.rollouts_per_example) == ("a", {"level": 3}, None, None)
    assert second.sampling.model_dump() == {"temperature": None, "max_tokens": 9}  # eval.sampling decides
    (other,) = given(load, f"{words} --eval.env.0.id c --eval.env.0.split test").evaluation_environments
    assert (other.id, other.split) == ("c", "test")


@pytest.mark.parametrize("words", ["", "--env.0.ratio 2", "--env.0.id a --env.1.ratio 2"])
def test_environment_without_id_is_refused(load, words, refusal):
    with refusal(UsageError):
        load_environments(given(load, words).env)


def test_name_of_an_environment_is_that_of_files(load):
    ids = ["./letters/", "me/letters@1", "../x/letters.py"]
    assert [default_environment_name(name) for name in ids] == ["letters"] * 3
    with pytest.raises(UsageError) as raised:
        load_environments(given(load, "--env.0.id letters --env.0.name math/easy").env)
    assert raised.value.code == "BK-CONFIG-VALUE"


def test_limits_are_passed_to_workers(load):
    env = given(load, "--env.0.max-turns 4 --env.0.max-memory-gb 0.5 --env.0.sampling.max-tokens 9").env[0]
    settings = worker_settings(env, "e", 600.0, None)
    assert (settings.isolation, settings.max_turns, settings.max_memory_bytes) == ("process", 4, 500_000_000)
    assert settings.sampling == {"max_tokens": 9}
    assert settings.rollout_timeout == 600.0
    plain = worker_settings(given(load, "--env.0.rollout-timeout 5").env[0], "e", 600.0, None)
    assert (plain.isolation, plain.rollout_timeout) == ("auto", 5.0)


def test_a_batch_has_a_number_of_rollouts_or_of_tokens(load, refused):
    assert given(load, "").batch_rollouts == 128
    tokens = load(
        OrchestratorConfig,
        "--token-batch-size 1000 --rollouts-per-example 4 --sampling.max-tokens 100 --max-async-level 0",
    )
    assert (tokens.batch_size, tokens.batch_rollouts) == (
        None,
        12,
    )  # 10 replies of 100 tokens, in whole groups
    assert tokens.max_concurrent_rollouts == 12
    text = refused(OrchestratorConfig, "--token-batch-size 1000 --batch-size 16")
    assert text.startswith("[BK-CONFIG-CONFLICT]")
