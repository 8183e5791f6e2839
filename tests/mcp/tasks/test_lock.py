"""`buckeye.lock.yaml` is read strictly, and changed without losing anything."""

from datetime import datetime, timedelta, timezone

import pytest

from buckeye.errors import ConfigError
from buckeye.mcp.tasks.lock_file import (
    EnvironmentLock,
    ImageName,
    dataset_reference,
    parse_image,
    read_lock,
    update_lock,
)

PAGE = """image: "my-org/my-env:latest"
primary_dataset:
  name: "my-org/my-tasks"
  task_count: 50
  updated_at: "2024-01-01T00:00:00"
"""


def written(tmp_path, text):
    path = tmp_path / "buckeye.lock.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_documented_lock_file_is_read(tmp_path):
    lock = read_lock(written(tmp_path, PAGE))
    assert lock.image_name == ImageName("my-org/my-env", "latest")
    dataset = {"name": "my-org/my-tasks", "task_count": 50, "updated_at": "2024-01-01T00:00:00"}
    assert lock.primary_dataset.model_dump() == dataset
    assert lock.tools is None
    assert lock.version == 1


def test_all_problems_are_reported_with_their_lines(tmp_path, refusal):
    path = written(
        tmp_path, "imag: a:b\nprimary_dataset: {name: a, task_count: -1}\ntools:\n  - nam: x\nversion: one\n"
    )
    with refusal(ConfigError):
        read_lock(path)


@pytest.mark.parametrize(
    "text",
    [
        "image: 'two words'",
        "image: a:b\nbuilt_at: yesterday",
        "image: a:b\nversion: 2",
        "- a",
        "image: a\nimage: b",
        "image: [",
        "image: !!python/object:os.system a",
    ],
)
def test_invalid_lock_files_are_refused(tmp_path, text, refusal):
    with refusal(ConfigError):
        read_lock(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "parts", "tagged", "short"),
    [
        ("env", ("env", "", ""), "env", "env"),
        ("my-env:latest", ("my-env", "latest", ""), "my-env:latest", "my-env"),
        ("host:5000/org/env:t", ("host:5000/org/env", "t", ""), "host:5000/org/env:t", "env"),
        ("localhost:5000/env", ("localhost:5000/env", "", ""), "localhost:5000/env", "env"),
        ("o/e@sha256:" + "a" * 64, ("o/e", "", "sha256:" + "a" * 64), "o/e@sha256:" + "a" * 64, "e"),
        ("o/e:v@sha256:" + "a" * 64, ("o/e", "v", "sha256:" + "a" * 64), "o/e:v", "e"),
    ],
)
def test_parse_image_returns_parts(text, parts, tagged, short):
    image = parse_image(text)
    assert image == ImageName(*parts)
    assert (image.tagged, image.short) == (tagged, short)


@pytest.mark.parametrize(
    "text", ["", "a b", "./x", "x/", "/x", "A", "a:b:c", "a@md5:00", "-a", "a//b", "a:", "$a"]
)
def test_parse_image_returns_none_for_invalid_references(text):
    assert parse_image(text) is None


def test_digest_may_be_a_separate_field():
    digest = "sha256:" + "b" * 64
    assert EnvironmentLock(image="a:b", digest=digest).image_name == ImageName("a", "b", digest)


COMMENTED = """# mine
image: "my-org/my-env:latest"  # the image
tools:
  - name: move   # a tool
    input_schema: {type: object}  # flow
    description: >-
      on
      and off
primary_dataset:
  # how many
  name: 'my-org/my-tasks'
  task_count: 50
  updated_at: 2024-01-01T00:00:00
# end
"""


def test_an_update_keeps_keys_comments_and_quotes(tmp_path):
    path = written(tmp_path, text := COMMENTED)
    at = datetime(2026, 1, 31, 14, 0, tzinfo=timezone(timedelta(hours=2)))
    update_lock(path, {"primary_dataset": dataset_reference("a/b", 3, at)})
    expected = (
        text.replace("name: 'my-org/my-tasks'", "name: 'a/b'")
        .replace("task_count: 50", "task_count: 3")
        .replace("updated_at: 2024-01-01T00:00:00", "updated_at: '2026-01-31T12:00:00+00:00'")
    )
    assert path.read_text() == expected
    assert read_lock(path).tools[0].description == "on and off"
    assert list(tmp_path.iterdir()) == [path]


def test_an_update_of_a_damaged_file_changes_nothing(tmp_path):
    path = written(tmp_path, "image: [\n")
    with pytest.raises(ConfigError) as caught:
        update_lock(path, {"version": 1})
    assert caught.value.code == "BK-CONFIG-SYNTAX"
    assert path.read_text() == "image: [\n"
