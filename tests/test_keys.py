"""Lookup order of keys, and storage of a key."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.dotenv import read_dotenv
from buckeye.base.keys import child_environment, key, key_files, key_states, masked, set_key, variables
from buckeye.errors import UsageError
from buckeye.monitor.redact import redact


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Home directory with a project. The working directory is a folder of the project."""
    folder = tmp_path / "home"
    (folder / "work" / "project" / "deep").mkdir(parents=True)
    (folder / ".buckeye").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "PRIME_API_KEY", "BUCKEYE_API_KEY", "BUCKEYE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder / "work" / "project" / "deep")
    return folder


def test_key_comes_from_environment_then_project_then_user(home, monkeypatch):
    (home / ".buckeye" / ".env").write_text("HF_TOKEN=user\nPRIME_API_KEY=user\nWANDB_API_KEY=user\n")
    (home / "work" / "project" / ".env").write_text("HF_TOKEN=project\nPRIME_API_KEY=project\n")
    monkeypatch.setenv("HF_TOKEN", "environment")
    assert (key("HF_TOKEN"), key("PRIME_API_KEY"), key("WANDB_API_KEY")) == ("environment", "project", "user")
    assert key("OPENAI_API_KEY_OF_NOBODY") == ""
    assert {state.name: state.where for state in key_states()} == {
        "BUCKEYE_API_KEY": None,
        "HF_TOKEN": "environment",
        "WANDB_API_KEY": str(home / ".buckeye" / ".env"),
        "PRIME_API_KEY": str(home / "work" / "project" / ".env"),
        "OPENAI_API_KEY": "environment" if "OPENAI_API_KEY" in os.environ else None,
    }


def test_only_the_nearest_project_file_is_read(home):
    (home / "work" / ".env").write_text("HF_TOKEN=far\nA=far\n")
    (home / "work" / "project" / ".env").write_text("HF_TOKEN=near\n")
    assert key("HF_TOKEN") == "near"
    assert "A" not in variables()


@pytest.mark.parametrize("mark", [".git", ".hg"])
def test_the_search_ends_at_the_root_of_a_repository(home, mark):
    (home / "work" / ".env").write_text("HF_TOKEN=of another project\n")
    (home / "work" / "project" / mark).mkdir()
    assert key("HF_TOKEN") == ""
    (home / "work" / "project" / ".env").write_text("HF_TOKEN=mine\n")
    assert key("HF_TOKEN") == "mine"


def test_the_search_ends_below_the_home_directory(home):
    (home / ".env").write_text("HF_TOKEN=of home\n")
    assert key("HF_TOKEN") == ""


def test_files_in_world_writable_folders_are_not_read(home):
    (home / "work" / ".env").write_text("HF_TOKEN=planted\n")
    (home / "work").chmod(0o777)
    assert key("HF_TOKEN") == ""
    assert key_files()[0] == home / "work" / "project" / "deep" / ".env"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user_in_the_working_directory_is_refused(home):
    folder = home / "work" / "project" / "deep"
    (folder / ".env").write_text("HF_TOKEN=ours\n")
    folder.chmod(0o1777)
    assert key("HF_TOKEN") == "ours"
    os.chown(folder / ".env", 12345, 12345)
    with pytest.raises(UsageError) as caught:
        key("HF_TOKEN")
    assert caught.value.code == "BK-FILE-PERMISSION"


def test_set_key_writes_a_private_file_and_keeps_other_lines(home):
    path = home / ".buckeye" / ".env"
    path.write_text("# mine\nOTHER=1 # why\nHF_TOKEN=old\nexport HF_TOKEN=older\n")
    assert set_key("HF_TOKEN", "hf_new") == path
    assert path.read_text() == "# mine\nOTHER=1 # why\nHF_TOKEN=hf_new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    set_key("PRIME_API_KEY", "x y")
    assert path.read_text().splitlines()[-1] == 'PRIME_API_KEY="x y"'
    assert [file.name for file in path.parent.iterdir()] == [".env"]


def test_set_key_creates_buckeye_home(home, monkeypatch, tmp_path):
    monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path / "elsewhere"))
    assert set_key("HF_TOKEN", "t") == tmp_path / "elsewhere" / ".env"
    assert key("HF_TOKEN") == "t"


@pytest.mark.parametrize(
    ("name", "value"), [("1X", "v"), ("A B", "v"), ("A", ""), ("A", "x\x00y"), ("A", "x\xa0y")]
)
def test_set_key_refuses_invalid_input_and_hides_the_value(home, name, value):
    with pytest.raises(UsageError) as caught:
        set_key(name, value)
    assert "x\x00y" not in str(caught.value)
    assert not (home / ".buckeye" / ".env").exists()


@given(st.text(min_size=1).filter(lambda text: text.replace("\n", "").isprintable()))
def test_set_key_value_survives_a_round_trip(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("BUCKEYE_HOME")
    os.environ["BUCKEYE_HOME"] = str(folder)
    try:
        assert read_dotenv(set_key("K", value))["K"] == value
    finally:
        os.environ.pop("BUCKEYE_HOME") if before is None else os.environ.update(BUCKEYE_HOME=before)


def test_child_environment_has_only_needed_keys():
    given = {
        "HF_TOKEN": "h",
        "PRIME_API_KEY": "p",
        "WANDB_API_KEY": "w",
        "BUCKEYE_API_KEY": "b",
        "PATH": "/bin",
    }
    assert set(child_environment(given, runs_rollouts=True)) == {"HF_TOKEN", "BUCKEYE_API_KEY", "PATH"}
    assert set(child_environment(given, runs_rollouts=False)) == {"HF_TOKEN", "PATH"}


def test_masked_shows_only_the_ends_of_long_values():
    assert masked("hf_abcdefghijklmnop") == "hf_…op"
    assert masked("short-secret") == "…"


def test_redact_hides_keys_from_files(home):
    (home / ".buckeye" / ".env").write_text("MY_SECRET=planted-in-a-file\n")
    assert "planted" not in str(redact({"note": "it is planted-in-a-file, look"}))
    (home / ".buckeye" / ".env").write_text("no line of a file\n")
    assert redact({"note": "x"}) == {"note": "x"}
