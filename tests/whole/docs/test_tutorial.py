"""docs/tutorials/first-run.md, run as printed: the model improves, and no key leaks.

Keys are planted in every place where users may keep them. The test goes beyond the tutorial: a push to a hub,
and a model behind a URL. No file, log or process argument contains a key, and each key is sent only to its
own service.
"""

import base64
import json
import re

import pytest
from tests.evaluation.chat_server import chat_server
from tests.run.fake_hub import FakeHub
from tests.whole.docs.blocks import blocks
from tests.whole.docs.tutorial_run import RECORD, TUTORIAL, Place, record_of, shown

ENVIRONMENT = {
    "HF_TOKEN": "hf_plantedplantedplantedplantedplan1",
    "WANDB_API_KEY": "planted2planted2planted2planted2planted2",
    "GUESS_KEY": "planted-3-of-the-environment-variable",
}
DOTENV = {
    "OPENAI_API_KEY": "sk-planted-4-in-the-folder-of-the-project",
    "BUCKEYE_API_KEY": "planted-5-of-the-gateway",
}
HOME = {"PRIME_API_KEY": "pit_planted6planted6planted6planted6"}
RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
PLANTED = {**ENVIRONMENT, **DOTENV, **HOME}

BEYOND = """\
buckeye hf guess/tasks.json --name my-org/guess --yes
buckeye auth status
WITH="--arg dataset=guess-tasks --arg config_path=configs/guess.yaml"
buckeye eval mcp $WITH --model m --base-url {model} --output-dir evals/elsewhere
buckeye rl status outputs/guess
buckeye rl list
buckeye rl logs outputs/guess
buckeye rl --debug --provider prime --gpus 8xH100 --yes || true
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    reply = "<think>I guess.</think><tool>done()</tool>"
    with FakeHub() as hub, chat_server(lambda body, number: reply) as (url, sent):
        place = Place(tmp_path_factory.mktemp("tutorial"), HF_ENDPOINT=hub.url, **ENVIRONMENT)
        for file, keys in dotenvs(place).items():
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(f"{name}={value}\n" for name, value in keys.items()))
            file.chmod(0o600)
        place.tutorial(before_its_configuration=lambda: plant_in_tasks(place.folder / "guess" / "tasks.json"))
        place.run(BEYOND.format(model=url))
    return place, hub, [str(request) for request in sent]


def dotenvs(place):
    return {place.folder / ".env": DOTENV, place.home / ".buckeye" / ".env": HOME}


def test_every_block_is_run_or_written():
    kinds = {(block.language, bool(block.file)) for block in blocks(TUTORIAL.partition("\n## 2. ")[2])}
    assert kinds == {("bash", False), ("python", True), ("toml", True)}
    assert TUTORIAL.count("\n```") == 2 * (len(blocks(TUTORIAL)) + 1)  # and the installation


def test_the_figures_of_the_page_are_those_of_its_record():
    """The rise is significant: the intervals do not overlap."""
    for pattern, text in shown(RECORDED).items():
        assert re.findall(pattern, TUTORIAL, re.S) == [text]
    assert RECORDED["after"]["low"] > RECORDED["before"]["high"]


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_the_model_gets_better(done):
    folder = done[0].folder
    made = record_of(folder, day="")
    assert made.keys() == RECORDED.keys()
    assert abs(made["before"]["value"] - RECORDED["before"]["value"]) < 0.1
    assert made["after"]["low"] > made["before"]["high"]
    assert (folder / "outputs" / "guess" / "run.toml").is_file()
    assert list((folder / "trained").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_no_key_is_anywhere(done):
    place, hub, requests = done
    token, key = PLANTED["HF_TOKEN"], PLANTED["OPENAI_API_KEY"]
    assert hub.tokens == {f"Bearer {token}"}
    uploaded = [content for files in hub.files.values() for content in files.values()]
    assert uploaded
    assert any(key in request for request in requests)
    places = {
        "printed": [place.said],
        "arguments": place.arguments,
        "sent to the model": [request.replace(key, "") for request in requests],
        "sent to the hub": [text_of("data.parquet", content) for content in uploaded],
        **{
            str(path): [text_of(path.name, path.read_bytes())]
            for path in files(place.root) - dotenvs(place).keys()
        },
    }
    assert found(places) == []


def test_the_scan_finds_what_is_there(tmp_path):
    import pyarrow
    import pyarrow.parquet

    key = PLANTED["GUESS_KEY"]
    pyarrow.parquet.write_table(pyarrow.table({"mcp_config": [f"Bearer {key}"] * 9}), tmp_path / "a.parquet")
    (tmp_path / "b").write_text(base64.b64encode(f"me:{key}".encode()).decode())
    (tmp_path / "c").write_bytes(b"\xff\x00" + key.encode())
    places = {path.name: [text_of(path.name, path.read_bytes())] for path in files(tmp_path)}
    assert {place for place, _ in found(places)} == {"a.parquet", "b", "c"}


def plant_in_tasks(file):
    """Let the tasks pass a user's key to their server by name."""
    tasks = json.loads(file.read_text())
    for task in tasks:
        (server,) = task["mcp_config"].values()
        server["env"] = {"GUESS_KEY": "$GUESS_KEY"}
    file.write_text(json.dumps(tasks))


def files(folder):
    """Return all files below a folder, except those of the virtual environment."""
    return {
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and (folder / "python") not in path.parents
    }


def text_of(name, content):
    """Return the text of a file; parquet is unpacked first."""
    if name.endswith(".parquet") and content[:4] == b"PAR1":
        import pyarrow
        import pyarrow.parquet

        content += str(pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()).encode()
    return content.decode("utf-8", errors="replace")


def found(places):
    """Return the places of planted keys, also if encoded in base64 at any offset."""
    wanted = {}
    for name, key in PLANTED.items():
        wanted[key] = name
        for shift in range(3):
            coded = base64.b64encode(b" " * shift + key.encode()).decode().rstrip("=")
            wanted[coded[4:-3]] = f"{name} in base64"
    return [
        (place, name)
        for place, texts in places.items()
        for key, name in wanted.items()
        if any(key in text for text in texts)
    ]
