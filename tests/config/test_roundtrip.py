"""Settings survive a round trip; the order of flags does not matter; no other errors are raised."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.config_files import read_file
from buckeye.config.inference import InferenceConfig
from buckeye.config.load import load_config, to_json
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.settings import flag_of
from buckeye.config.sft import SFTConfig
from buckeye.config.structure import paths_of
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import ConfigError, UsageError

ROOTS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig)
counts = st.integers(1, 10**6)
names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="$"), min_size=1, max_size=8
).filter(lambda text: text not in ("None", "null"))

RUN = {
    "trainer.optim.lr": st.floats(0, 1),
    "trainer.optim.weight_decay": st.floats(0, 1e300),
    "trainer.optim.max_norm": st.none() | st.floats(1e-300, 1e6),
    "trainer.model.name": names,
    "trainer.model.attn": st.sampled_from(["sdpa", "flash_attention_2"]),
    "trainer.model.ac": st.none() | st.just({}),
    "trainer.ckpt.keep": st.none() | counts,
    "trainer.loss.kl_estimator": st.sampled_from(["k3", "k3_weighted"]),
    "trainer.scheduler": st.sampled_from([{"type": "linear", "decay": 3}, {"type": "cosine"}, {}]),
    "trainer.seed": st.integers(-(2**63), 2**63),
    "orchestrator.batch_size": counts,
    "orchestrator.max_steps": st.none() | counts,
    "orchestrator.advantage": st.none() | st.just({"std_norm": "global", "leave_one_out": True}),
    "orchestrator.buffer": st.sampled_from([{"type": "online-difficulty"}, {}]),
    "orchestrator.eval": st.none() | st.just({"interval": 3, "env": [{"id": "e"}]}),
    "orchestrator.env": st.lists(
        st.fixed_dictionaries(
            {"id": names, "args": st.dictionaries(names, st.none() | counts | names | st.booleans())}
        ),
        min_size=1,
        max_size=3,
    ),
    "orchestrator.zero_spread": st.sampled_from(["keep", "drop"]),
    "orchestrator.client.base_url": st.lists(st.integers(1, 65535).map("http://h:{}".format), min_size=1),
    "inference.kv_cache_gb": st.none() | st.floats(0.1, 1e3),
    "inference.parallel.dp": st.integers(1, 8),
    "inference.server.host": st.none() | names,
    "log.level": st.sampled_from(["debug", "INFO", "error"]),
    "ckpt.interval": st.none() | counts,
    "max_async_level": st.none() | st.integers(0, 9),
    "output_dir": names,
    "resume": st.booleans(),
}
some_of_a_run = st.fixed_dictionaries({}, optional=RUN)


def _nested(flat):
    tree = {"trainer": {}, "orchestrator": {}}
    for path, value in flat.items():
        *above, last = path.split(".")
        table = tree
        for key in above:
            table = table.setdefault(key, {})
        table[last] = value
    return tree


def _loaded_from_json(model, text):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(text, encoding="utf-8")
        return load_config(model, ["@", str(file)])


@given(some_of_a_run)
def test_configuration_survives_a_round_trip(flat):
    config = _loaded_from_json(RLConfig, json.dumps(_nested(flat)))
    assert _loaded_from_json(RLConfig, to_json(config)) == config
    for part in (config.trainer, config.orchestrator, config.inference):
        if part is not None:
            assert _loaded_from_json(type(part), to_json(part)) == part


def test_none_over_a_default_survives_a_round_trip(load):
    config = load(TrainerConfig, "--optim.max-norm None --ckpt --ckpt.keep None")
    again = _loaded_from_json(TrainerConfig, to_json(config))
    assert again == config
    assert again.optim.max_norm is again.ckpt.keep is None
    sft = load(SFTConfig, "--data.path x")
    assert _loaded_from_json(SFTConfig, to_json(sft)) == sft


def _flags(flat):
    return [[f"{flag_of(path.split('.'))}={_text(value)}"] for path, value in flat.items()]


def _text(value):
    return value if isinstance(value, str) else json.dumps(value)


@given(st.data(), some_of_a_run)
def test_flags_in_any_order_equal_a_file(data, flat):
    flat.pop("inference.server.host", None)
    groups = [["--trainer"], ["--orchestrator"], *_flags(flat)]
    shuffled = data.draw(st.permutations(groups))
    config = load_config(RLConfig, [word for group in shuffled for word in group])
    assert config == _loaded_from_json(RLConfig, json.dumps(_nested(flat)))


def assert_is_message(error, name=""):
    assert str(error).strip()
    assert name in str(error)


FLAGS = [flag_of(path) for root in (RLConfig, SFTConfig) for path in paths_of(root)]
JUNK = (
    "@ @x -- - = { [ [[[ {} [] 0,1 None null true -1 nan 1e999 --no-clean --a..b --. --= / @/ inf . "
    '{"a":1} \x00 @\x00'
)
junk = st.text(max_size=6) | st.sampled_from([*JUNK.split(), "9" * 5000, "[" * 5000])
words = st.lists(
    st.sampled_from(FLAGS) | st.builds("{}={}".format, st.sampled_from(FLAGS), junk) | junk, max_size=8
)


@given(st.sampled_from(ROOTS), words)
def test_any_command_line_loads_or_raises_usage_error(model, argv):
    try:
        load_config(model, argv)
    except UsageError as error:
        assert_is_message(error)


PIECES = """a.b= " ' [ ] { } = , # \\ 1979-05-27 0x1F None True “ \x00 1e999 =="""
lines = ["a = 1\n", "[a]\n", "[[b]]\n", "toml_files = ['f.toml']\n", "[" * 3000, '"""', "\n", " "]
pieces = st.sampled_from([*PIECES.split(" "), *lines]) | st.text(max_size=4)


@given(st.lists(pieces, max_size=12).map("".join), st.sampled_from([".toml", ".json"]))
def test_any_file_loads_or_raises_config_error(text, suffix):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"f{suffix}"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read_file(str(file))
        except ConfigError as error:
            assert_is_message(error, f"f{suffix}")


@given(st.binary(max_size=40))
def test_any_bytes_load_or_raise_config_error(content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "f.toml"
        file.write_bytes(content)
        try:
            read_file(str(file))
        except ConfigError as error:
            assert_is_message(error, "f.toml")
