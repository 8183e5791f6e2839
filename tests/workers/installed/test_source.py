"""Arguments that `buckeye env install` accepts."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buckeye.errors import BuckeyeError, UsageError
from buckeye.workers.installed.install import InstallRequest, _Installation
from buckeye.workers.installed.install_source import WITHOUT_ADAPTER, parse_source
from buckeye.workers.installed.private_index import hub_account
from buckeye.workers.installed.venv import Installer, find_needed_python

HUB = "https://hub.primeintellect.ai/harleycooper/simple/"


@pytest.mark.parametrize(
    ("text", "requirement", "env_id", "index"),
    [
        ("harleycooper/dakota1890", "dakota1890", "harleycooper/dakota1890", HUB),
        ("harleycooper/dakota1890@0.1.12", "dakota1890==0.1.12", "harleycooper/dakota1890", HUB),
        ("harleycooper/dakota1890@latest", "dakota1890", "harleycooper/dakota1890", HUB),
        (
            "harleycooper/dakota1890[verifiers-v0]@1",
            "dakota1890[verifiers-v0]==1",
            "harleycooper/dakota1890",
            HUB,
        ),
        ("My_Env", "my-env", "my-env", None),
        ("my-env==1.2", "my-env==1.2", "my-env", None),
        ("my-env@1.2", "my-env==1.2", "my-env", None),
        ("my-env[a,b]>=1", "my-env[a,b]>=1", "my-env", None),
        ("reasoning-gym", "reasoning-gym", "reasoning-gym", None),
        ("reasoning-gym/chain_sum", "reasoning-gym", "reasoning-gym", None),
        ("textarena/Wordle-v0", "textarena", "textarena", None),
    ],
)
def test_ids_and_packages(text, requirement, env_id, index):
    source = parse_source(text)
    assert (source.requirement, source.env_id, source.index) == (requirement, env_id, index)
    own = "https://packages.example/simple/"
    assert parse_source("a/b", own).index == own


def test_a_project_is_a_path_even_where_it_could_be_an_id(tmp_path, monkeypatch):
    project = tmp_path / "environments" / "some-env"
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "Some.Env"\nversion = "1"\n')
    monkeypatch.chdir(tmp_path)
    source = parse_source("environments/some-env[extra]")
    assert (source.kind, source.name, source.requirement) == ("path", "some-env", f"{project}[extra]")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("./nowhere", "BK-FILE-NOT-FOUND"),
        ("a/b/c", "BK-CLI-ARGUMENT"),
        ("two words", "BK-CLI-ARGUMENT"),
        ("--flag", "BK-CLI-ARGUMENT"),
        ("", "BK-CLI-ARGUMENT"),
        ("~nobody-of-this-name/env", "BK-FILE-NOT-FOUND"),
    ],
)
def test_malformed_source_is_refused(text, code):
    with pytest.raises(UsageError) as caught:
        parse_source(text)
    assert caught.value.code == code


@pytest.mark.parametrize("library", WITHOUT_ADAPTER)
def test_an_environment_of_a_library_without_adapter_is_refused_as_env_check_does(library):
    for text in (library, f"{library}/Name-v1", f"{library.replace('-', '_')}/Name-v1@2"):
        with pytest.raises(UsageError) as caught:
            parse_source(text)
        assert caught.value.code == "BK-ENV-UNSUPPORTED"
    assert parse_source(f"{library}/name", "https://packages.example/simple/").owner == library


def test_a_folder_without_a_name_is_refused(tmp_path, refusal):
    (tmp_path / "pyproject.toml").write_text("[tool.x]\n")
    with refusal(UsageError):
        parse_source(str(tmp_path))


@pytest.mark.parametrize("who", ["me:hunter2", "hunter2", ":hunter2"])
def test_a_password_in_an_index_is_refused(who):
    with pytest.raises(UsageError) as refused:
        parse_source("a/b", f"https://{who}@packages.example/simple/")
    assert refused.value.code == "BK-CLI-ARGUMENT"
    assert "hunter2" not in str(refused.value)


@given(st.text(max_size=30))
@example("~\0")
def test_any_text_is_a_source_or_a_usage_error(text):
    try:
        source = parse_source(text)
    except UsageError:
        return
    assert source.name
    assert not source.requirement.startswith("-")


@pytest.mark.parametrize(
    ("said", "specifier", "version"),
    [
        ("| ERROR: Package 'x' requires a different Python: 3.11.7 not in '>=3.14'", ">=3.14", "3.14"),
        (
            "ERROR: Ignored the following versions: 1.0 Requires-Python <3.9; 1.1 Requires-Python <3.9",
            "<3.9",
            "3.8",
        ),
        (
            "Because the current Python\n  | version (3.11.7) does not satisfy\n  | Python>=3.13 and x",
            ">=3.13",
            "3.13",
        ),
        ("does not satisfy Python>=3.12.4,<3.13 and", ">=3.12.4,<3.13", "3.12"),
    ],
)
def test_required_python_is_parsed_from_installer_output(said, specifier, version):
    assert find_needed_python(said) == (specifier, version)


@pytest.mark.parametrize("said", ["no such package", "does not satisfy Python>=4", "Requires-Python >=x"])
def test_other_installer_output_has_no_required_python(said):
    assert find_needed_python(said) is None


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A folder without keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PRIME_API_KEY", "BUCKEYE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_key_of_the_hub_is_found_where_other_keys_are(nowhere):
    assert hub_account() is None
    (nowhere / ".prime").mkdir()
    (nowhere / ".prime" / "config.json").write_text('{"api_key": "stored"}')
    assert hub_account().api_key == "stored"
    (nowhere / ".env").write_text("PRIME_API_KEY=of-the-project\n")
    assert hub_account().api_key == "of-the-project"


def test_failed_hub_download_error_does_not_claim_a_missing_environment(nowhere, refusal):
    class Offline:
        def install(self, *_, **__):
            raise BuckeyeError("`uv` failed: no address for hub.primeintellect.ai")

    with refusal(BuckeyeError):
        request = InstallRequest(what="harleycooper/dakota1890")
        installation = _Installation(request, parse_source(request.what), None, nowhere, print)
        installation._install_alone(Offline(), nowhere)


def test_misspelled_folder_is_suggested(tmp_path, monkeypatch, refusal):
    (tmp_path / "my-env").mkdir()
    (tmp_path / "my-env" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    with refusal(UsageError):
        parse_source("./my-evn")

    def fail(*_):
        raise BuckeyeError("`uv` failed: my-evn was not found", hint="retry")

    monkeypatch.setattr(_Installation, "_install", fail)
    monkeypatch.setattr(Installer, "create", lambda *_: None)
    request = InstallRequest(what="my-evn")
    with refusal(BuckeyeError):
        _Installation(request, parse_source("my-evn"), None, tmp_path, print).build(tmp_path)
