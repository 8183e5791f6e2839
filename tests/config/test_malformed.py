"""What a person reads after a mistake: the place, what is wrong, what to do."""

import pytest

from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import ConfigError

IN_FILES = {
    "unquoted text": (
        TrainerConfig,
        "max_steps = 1000\n\n[model]\nname = Qwen/Qwen3-0.6B\n",
        "f.toml:4:8: this is not a value in TOML.\n"
        "    name = Qwen/Qwen3-0.6B\n"
        "           ^\n"
        "  Text needs quotes. Write:\n"
        '    name = "Qwen/Qwen3-0.6B"',
    ),
    "unknown setting with initials": (
        TrainerConfig,
        "[optim]\nlearning_rate = 3e-6\n",
        "f.toml:2: optim.learning_rate: no such setting. Did you mean lr?",
    ),
    "unknown setting of another section": (
        OrchestratorConfig,
        "max_tokens = 5\n",
        "f.toml:1: max_tokens: no such setting. Did you mean sampling.max_tokens"
        " or env.0.max_tokens or eval.sampling.max_tokens?",
    ),
    "unknown section": (
        TrainerConfig,
        "[modle]\nname = 'x'\n",
        "f.toml:1: modle: no such setting. Did you mean model?",
    ),
    "a dash in a key": (
        TrainerConfig,
        "[scheduler]\ntype = 'linear'\nmin-lr = 3\n",
        "f.toml:3: scheduler.min-lr: no such setting. Did you mean min_lr?",
    ),
    "unknown setting in a list of sections": (
        OrchestratorConfig,
        "[[env]]\nid = 'a'\n[[env]]\nid = 'b'\nnmae = 'B'\n",
        "f.toml:5: env.1.nmae: no such setting. Did you mean name?",
    ),
    "a setting of another variant": (
        TrainerConfig,
        "[optim]\ntype = 'sgd'\nbetas1 = 0.8\n",
        "f.toml:3: optim.betas1: only with optim.type = adamw or adamw8bit or muon, and it is sgd.",
    ),
    "an unknown variant": (
        TrainerConfig,
        "[optim]\ntype = 'adam'\n",
        'f.toml:2: optim.type: is "adam"; expected one of adamw, adamw8bit, sgd, muon. '
        "Did you mean adamw or adamw8bit?",
    ),
    "a section that is a value": (
        TrainerConfig,
        "optim = 'adamw'\n",
        'f.toml:1: optim: is "adamw"; expected a section (settings of its own).',
    ),
    "a value that is a section": (
        TrainerConfig,
        "[max_steps]\nvalue = 3\n",
        "f.toml:1: max_steps: is a table; expected a whole number > 0, or None.",
    ),
    "one section where a list is expected": (
        OrchestratorConfig,
        "[env]\nid = 'a'\n",
        "f.toml:1: env: is a table; expected a list of sections.",
    ),
    "an empty list": (
        OrchestratorConfig,
        "env = []\n",
        "f.toml:1: env: is an empty list; expected a list of sections.",
    ),
    "an out-of-range value": (
        InferenceConfig,
        "[server]\nport = 99999\n",
        "f.toml:2: server.port: is 99999; expected a whole number >= 1 <= 65535.",
    ),
    "a wrong word": (
        TrainerConfig,
        "[scheduler]\ntype = 'linear'\nwarmup = 'ten'\n",
        'f.toml:3: scheduler.warmup: is "ten"; expected a whole number >= 0.',
    ),
    "a key without a value": (
        TrainerConfig,
        "seed = 1\nmax_steps =\n",
        "f.toml:2:12: this is not a value in TOML.\n    max_steps =\n               ^",
    ),
}

ON_THE_COMMAND_LINE = {
    "unknown flag": (
        TrainerConfig,
        "--optim.learning-rate 1",
        "--optim.learning-rate: no such setting. Did you mean --optim.lr?",
    ),
    "unknown flag at the root": (
        RLConfig,
        "--lr 1 {ok}",
        "--lr: no such setting. Did you mean --trainer.optim.lr?",
    ),
    "a flag without its value": (
        TrainerConfig,
        "--max-steps --seed 3",
        "--max-steps: needs a value: a whole number > 0, or None.",
    ),
    "a negation with a value": (
        RLConfig,
        "--no-clean=true {ok}",
        "--no-clean: no such setting. Did you mean --clean?",
    ),
    "a negation of a number": (
        TrainerConfig,
        "--no-max-steps",
        "--no-max-steps: no such setting. Did you mean --max-steps?",
    ),
    "a stray word": (
        TrainerConfig,
        "train",
        "unexpected argument 'train'. Settings are written --name VALUE, files @ FILE.toml.",
    ),
    "a file without @": (
        TrainerConfig,
        "train.toml",
        "unexpected argument 'train.toml'. To read a file, write @ train.toml.",
    ),
    "a section's file without @": (
        RLConfig,
        "--trainer train.toml --orchestrator",
        "--trainer: 'train.toml' is no section. Write --trainer.NAME VALUE or --trainer @ FILE",
    ),
    "one dash": (
        TrainerConfig,
        "-seed 3",
        "unexpected argument '-seed'. Settings are written --name VALUE, files @ FILE.toml.",
    ),
    "@ and nothing": (TrainerConfig, "@", "@ needs a file: @ FILE.toml"),
    "@ for a single value": (
        TrainerConfig,
        "--max-steps @ other.toml",
        "--max-steps: needs a value: a whole number",
    ),
    "a file that is not there": (
        TrainerConfig,
        "@ trian.toml",
        "there is no file trian.toml. Did you mean train.toml?",
    ),
    "a folder that is not there": (
        RLConfig,
        "--trainer @ nowhere/t.toml",
        "--trainer: there is no file nowhere/t.toml. The folder nowhere does not exist either",
    ),
    "YAML": (TrainerConfig, "@ f.yaml", "f.yaml is YAML; configuration files are TOML (or JSON)."),
    "broken JSON": (TrainerConfig, "--ckpt {interval:3}", "--ckpt: '{interval:3}' is not valid JSON"),
    "an index that skips": (
        OrchestratorConfig,
        "--env.2.id a",
        "--env.2.id: env has 0 entries, so the next one is number 0.",
    ),
    "a name where an index is needed": (
        OrchestratorConfig,
        "--env.id a",
        "--env.id: env is a list of sections, so it has no id.",
    ),
    "a setting inside a value": (
        TrainerConfig,
        "--max-steps.x 3",
        "--max-steps.x: max_steps is a whole number > 0, or None, so it has no x.",
    ),
    "required settings": (
        SFTConfig,
        "--max-steps 3",
        "data: required: give it a file (--data @ FILE.toml), or settings of its own, at least --data.path.",
    ),
    "a required setting": (
        SFTConfig,
        "--data.seed 1",
        "data.path: required: set it with --data.path, or in a file.",
    ),
    "too few examples": (
        OrchestratorConfig,
        "--eval.env.0.num-examples -2",
        "--eval.env.0.num-examples: is -2; expected a whole number",
    ),
}


@pytest.mark.parametrize("case", IN_FILES)
def test_mistakes_in_files(refused, folder, case):
    model, text, expected = IN_FILES[case]
    folder.write("f.toml", text)
    assert refused(model, "@ f.toml") == expected


@pytest.mark.parametrize("case", ON_THE_COMMAND_LINE)
def test_mistakes_on_the_command_line(refused, folder, case):
    model, words, expected = ON_THE_COMMAND_LINE[case]
    folder.write("train.toml", "seed = 1\n")
    folder.write("other.toml", "seed = 1\n")
    message = refused(model, words.replace("{ok}", "--trainer --orchestrator"))
    if case in ("required sections", "required settings") or not message.startswith("2 problems"):
        assert message.startswith(expected)
    else:
        assert expected in message


def test_all_problems_are_reported_at_once(refused, folder):
    folder.write("t.toml", "[optim]\nlearning_rate = 1\nlr = 'fast'\n")
    folder.write("o.toml", "batch_size = 0\n[[env]]\nidd = 'a'\n")
    message = refused(RLConfig, "--trainer @ t.toml --orchestrator @ o.toml --lrr 3 --clean maybe")
    assert message.split("\n") == [
        "6 problems in the configuration",
        "  --lrr: no such setting. Did you mean --trainer.optim.lr?",
        "  unexpected argument 'maybe'. Settings are written --name VALUE, files @ FILE.toml.",
        '  t.toml:3: trainer.optim.lr: is "fast"; expected a number >= 0.',
        "  t.toml:2: trainer.optim.learning_rate: no such setting. Did you mean lr?",
        "  o.toml:1: orchestrator.batch_size: is 0; expected a whole number > 0.",
        "  o.toml:3: orchestrator.env.0.idd: no such setting. Did you mean id?",
    ]


def test_files_that_are_no_text(refused, folder):
    (folder.path / "f.toml").write_bytes(b"seed = 1\nname = '\xff'\n")
    assert refused(TrainerConfig, "@ f.toml") == "f.toml:2: not UTF-8. Save the file as UTF-8."


def test_the_error_is_for_the_command_line():
    assert ConfigError.exit_code == 2
