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
    """Home directory with a project, and ~/work/project/deep as the working directory."""
    folder = tmp_path / "home"
    (folder / "work" / "project" / "deep").mkdir(parents=True)
    (folder / ".buckeye").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "PRIME_API_KEY", "BUCKEYE_API_KEY", "BUCKEYE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder / "work" / "project" / "deep")
    return folder


def test_the_environment_wins_over_the_project_and_that_over_the_user(home, monkeypatch):
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


def test_only_the_nearest_file_of_the_project_counts(home):
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


def test_files_of_folders_that_anybody_may_write_to_are_not_read(home):
    (home / "work" / ".env").write_text("HF_TOKEN=planted\n")
    (home / "work").chmod(0o777)
    assert key("HF_TOKEN") == ""
    assert key_files()[0] == home / "work" / "project" / "deep" / ".env"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_that_somebody_else_has_put_where_we_are_is_refused(home):
    folder = home / "work" / "project" / "deep"
    (folder / ".env").write_text("HF_TOKEN=ours\n")
    folder.chmod(0o1777)
    assert key("HF_TOKEN") == "ours"
    os.chown(folder / ".env", 12345, 12345)
    with pytest.raises(UsageError, match="is of another user"):
        key("HF_TOKEN")


def test_a_key_is_stored_for_the_user_alone_and_other_lines_stay(home):
    path = home / ".buckeye" / ".env"
    path.write_text("# mine\nOTHER=1 # why\nHF_TOKEN=old\nexport HF_TOKEN=older\n")
    assert set_key("HF_TOKEN", "hf_new") == path
    assert path.read_text() == "# mine\nOTHER=1 # why\nHF_TOKEN=hf_new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    set_key("PRIME_API_KEY", "x y")
    assert path.read_text().splitlines()[-1] == 'PRIME_API_KEY="x y"'
    assert [file.name for file in path.parent.iterdir()] == [".env"]


def test_the_folder_is_made_and_can_be_another(home, monkeypatch, tmp_path):
    monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path / "elsewhere"))
    assert set_key("HF_TOKEN", "t") == tmp_path / "elsewhere" / ".env"
    assert key("HF_TOKEN") == "t"


@pytest.mark.parametrize(
    ("name", "value"), [("1X", "v"), ("A B", "v"), ("A", ""), ("A", "x\x00y"), ("A", "x\xa0y")]
)
def test_what_cannot_be_written_is_refused_without_its_value(home, name, value):
    with pytest.raises(UsageError) as caught:
        set_key(name, value)
    assert "x\x00y" not in str(caught.value)
    assert not (home / ".buckeye" / ".env").exists()


@given(st.text(min_size=1).filter(lambda text: text.replace("\n", "").isprintable()))
def test_any_value_comes_back(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("BUCKEYE_HOME")
    os.environ["BUCKEYE_HOME"] = str(folder)
    try:
        assert read_dotenv(set_key("K", value))["K"] == value
    finally:
        os.environ.pop("BUCKEYE_HOME") if before is None else os.environ.update(BUCKEYE_HOME=before)


def test_a_process_of_a_run_gets_the_keys_it_has_use_for():
    given = {
        "HF_TOKEN": "h",
        "PRIME_API_KEY": "p",
        "WANDB_API_KEY": "w",
        "BUCKEYE_API_KEY": "b",
        "PATH": "/bin",
    }
    assert set(child_environment(given, runs_rollouts=True)) == {"HF_TOKEN", "BUCKEYE_API_KEY", "PATH"}
    assert set(child_environment(given, runs_rollouts=False)) == {"HF_TOKEN", "PATH"}


def test_a_masked_value_tells_little():
    assert masked("hf_abcdefghijklmnop") == "hf_…op"
    assert masked("short-secret") == "…"


def test_keys_from_files_are_hidden_wherever_settings_are_shown(home):
    (home / ".buckeye" / ".env").write_text("MY_SECRET=planted-in-a-file\n")
    assert "planted" not in str(redact({"note": "it is planted-in-a-file, look"}))
    (home / ".buckeye" / ".env").write_text("no line of a file\n")
    assert redact({"note": "x"}) == {"note": "x"}
