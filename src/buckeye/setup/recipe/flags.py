"""The flags of `buckeye rl` itself, and their separation from the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from buckeye.config.flag_values import parse_bool
from buckeye.config.flags import apply_flags, parse_flags
from buckeye.config.problems import closest, config_error
from buckeye.config.rl import RLConfig
from buckeye.config.settings import Settings
from buckeye.config.shared import BaseConfig
from buckeye.config.structure import fields_of, resolve
from buckeye.config.validation import validate
from buckeye.errors import UsageError

_WITH_FILES = {"dry_run", "provider", "yes"}
_RESUME = "--resume"
_ELSEWHERE = {"host", "region", "max_price", "max_hours", "keep", "disk_gb", "identity_file"}
_REMOTE = {"gpus"} | _ELSEWHERE
_EVALUATION = ("orchestrator", "eval")
_WANDB = "wandb"
_WHOLE = ("--trainer", "--orchestrator")  # sections that every complete configuration has
_INSTEAD = {
    ("clean",): "a new run has a folder of its own, so that there is nothing to delete. Leave it out",
    ("resume",): "this makes a new run. To go on with one that is there, type\n  buckeye rl resume RUN",
    ("output_dir",): "where a run is put together here, this flag is called --output",
}


class TrainFlags(BaseConfig):
    """Flags of `buckeye rl` for the parts of a run and its machine."""

    model: str | None = None
    """A folder, or a name on the Hugging Face hub."""
    dataset: str | None = None
    """A JSON file, a folder of `buckeye hf`, or a hub name."""
    config: Path | None = None
    """The environment, as `buckeye rl init` writes it."""
    gpus: str | None = None
    """Number and type; else the GPUs that are here."""
    provider: Literal["local", "prime", "ssh"] | None = None
    """This machine, a rented one, a host of yours."""
    output: Path | None = None
    """Where all is written; with @ FILE it is --output-dir."""
    no_eval: bool = False
    """No evaluation on held-out tasks, at start and end."""
    no_wandb: bool = False
    """No Weights & Biases, although its key is known."""
    max_price: PositiveFloat | None = None
    """The most that renting may cost, in US $ an hour."""
    max_hours: PositiveFloat | None = None
    """Stop after so long, however far the run is."""
    keep: bool = False
    """Do not end a rented machine; it goes on to cost."""
    host: list[str] = Field(default_factory=list)
    """For ssh: [USER@]HOST[:PORT]."""
    region: list[str] = Field(default_factory=list)
    """Rent in these regions only."""
    disk_gb: PositiveInt | None = None
    """Disk to rent; else what the run should need."""
    identity_file: Path | None = None
    """The private key for ssh."""
    dry_run: bool = False
    """Show the plan; write and start nothing."""
    trust: bool = False
    """Allow what a hub's tasks use: programs, addresses."""
    yes: bool = False
    """Ask nothing: decide, or say which flag is missing."""
    quiet: bool = False
    """Print no plan."""
    as_json: bool = False
    """Print the plan as one JSON object."""

    @property
    def remote(self) -> bool:
        """True if the run is on another machine."""
        return self.provider not in (None, "local")


@dataclass(frozen=True, slots=True)
class TrainArgs:
    """A command line: the flags of the command, and the args that are `settings` of the run."""

    flags: TrainFlags
    settings: tuple[str, ...]

    @property
    def has_files(self) -> bool:
        """True if the settings include files, which then define the whole run."""
        return any(word.startswith("@") for word in self.settings)

    @property
    def is_composed(self) -> bool:
        """True if the run is to be composed from parts."""
        given = self.flags.model_fields_set - {"dry_run"}
        whole = all(any(word.startswith(name) for word in self.settings) for name in _WHOLE)
        return not self.has_files and (bool(given) or not whole)

    def check_composed(self) -> None:
        """Check the args as far as possible without the parts.

        Raises ConfigError for args that are not settings, and UsageError for settings that make no sense in a
        run composed here.
        """
        parsed = parse_flags(RLConfig, self.settings)
        if parsed.problems:
            raise config_error(parsed.problems)
        for one in parsed.assignments:
            if one.path == ("model",) and not one.value:
                raise UsageError("--model: needs a value: a folder, or a name on the Hugging Face hub")
            if one.path in _INSTEAD:
                raise UsageError(f"{one.location.text}: {_INSTEAD[one.path]}")
            if one.path[:2] == _EVALUATION and self.flags.no_eval:
                raise UsageError(
                    f"{one.location.text} sets an evaluation, and --no-eval has none: leave one out"
                )
            if self.flags.no_wandb and _WANDB in one.path:
                raise UsageError(f"{one.location.text} logs to W&B, and --no-wandb does not: leave one out")
        given = sorted(self.flags.model_fields_set & _ELSEWHERE)
        if given and not self.flags.remote:
            raise UsageError(
                f"--{flag_name(given[0])} is for a run on another machine: add --provider prime or "
                "ssh, or leave it out"
            )

    @property
    def seq_len(self) -> int | None:
        """The `--seq-len` among the settings; None if it is missing or not a number."""
        values = [
            one.value for one in parse_flags(RLConfig, self.settings).assignments if one.path == ("seq_len",)
        ]
        return values[-1] if values and isinstance(values[-1], int) else None

    @property
    def selects_tracker(self) -> bool:
        """True if the settings select a tracker."""
        names = {name for one in parse_flags(RLConfig, self.settings).assignments for name in one.path}
        return not names.isdisjoint({_WANDB, "trackio", "tensorboard"})

    def plain_settings(self) -> list[str]:
        """Return the settings if they are the whole run. Raises UsageError for flags that need parts."""
        given = self.flags.model_fields_set - _WITH_FILES
        given -= _REMOTE if self.flags.remote else set()
        if given:
            first = flag_name(sorted(given)[0])
            where = "; for another machine add --provider" if sorted(given)[0] in _REMOTE else ""
            raise UsageError(
                f"--{first} is for a run that is put together here, and @ FILE is a whole one: leave out one "
                f"of them, or change what the file says by a setting, as --model.name or --output-dir{where}"
            )
        said = [f"--dry-run={self.flags.dry_run}".lower()] if "dry_run" in self.flags.model_fields_set else []
        return [*self.settings, *said]

    @property
    def is_resume(self) -> bool:
        """True if an earlier run is to be resumed."""
        return _RESUME in self.settings

    def only_file(self) -> Path:
        """Return the only file of a remote run. Raises UsageError if there are other settings."""
        words = [word for word in self.settings if word != _RESUME]
        name = words[1] if words[:1] == ["@"] and len(words) == 2 else words[0][1:] if len(words) == 1 else ""
        if not name:
            raise UsageError(
                "--provider: put all settings into one file, and name it: `buckeye rl @ run.toml ...`; only "
                "--resume may stand beside it"
            )
        return Path(name)


def parse_train_args(argv: Sequence[str]) -> TrainArgs:
    """Separate the flags of the command from the settings of the run. Raises ConfigError for invalid ones."""
    own, settings = _split(list(argv))
    parsed = parse_flags(TrainFlags, own)
    for one in parsed.assignments:
        if one.value == "":
            raise UsageError(f"{one.location.text} is empty")
    values = Settings()
    problems = [*parsed.problems, *apply_flags(parsed.assignments, values)]
    flags, wrong = validate(TrainFlags, values)
    problems += wrong
    if flags is None or problems:
        raise config_error(problems)
    return TrainArgs(flags, tuple(settings))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    own: list[str] = []
    settings: list[str] = []
    while words:
        word = words.pop(0)
        word = "--as-json" if word == "--json" else word
        name = _own_name(word)
        if name is None or (name == "model" and _is_section(word, words)):
            _refuse_misspelt(word)
            settings.append(word)
            continue
        own.append(word)
        if "=" in word:
            continue
        following = words[0] if words else "--"
        if fields_of(TrainFlags)[name].is_flag:
            own += [words.pop(0)] if parse_bool(following) is not None else []
        elif not following.startswith(("--", "@")):
            own.append(words.pop(0))
    return own, settings


def _own_name(word: str) -> str | None:
    """Return the field that a flag of the command sets, or None for other args."""
    if not word.startswith("--"):
        return None
    name = word[2:].partition("=")[0].replace("-", "_")
    return name if name in fields_of(TrainFlags) else None


def flag_name(field: str) -> str:
    """Return the name of a flag as users type it, without dashes in front."""
    return "json" if field == "as_json" else field.replace("_", "-")


def _is_section(word: str, following: Sequence[str]) -> bool:
    """Return True if `--model` is the section of that name: with a file, with JSON, or alone."""
    value = word.partition("=")[2] if "=" in word else (following[0] if following else "--")
    return value.startswith(("@", "{", "--"))


def _refuse_misspelt(word: str) -> None:
    """Raise UsageError for an unknown flag that resembles a flag of the command."""
    if not word.startswith("--") or len(word) == 2 or "." in word:
        return
    name = word[2:].partition("=")[0]
    known = [flag_name(field) for field in fields_of(TrainFlags)]
    near = closest(name, known)
    bare = name.removeprefix("no-").removeprefix("no_")
    if near and resolve(RLConfig, [bare]).shape is None and resolve(RLConfig, [name]).shape is None:
        raise UsageError(f"--{name}: no such flag. Did you mean --{near[0]}? `buckeye rl --help` lists all.")
