"""The parts of a run for `buckeye rl`: given as flags, found in the working directory, or created now."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.storage import write_file
from buckeye.base.terminal import choose, confirm, prompt_for_text, show_file
from buckeye.cli.hf import hf
from buckeye.errors import UsageError
from buckeye.mcp.config import GymConfig, load_gym_config
from buckeye.mcp.tasks.dataset import find_taskset, is_dataset
from buckeye.mcp.tasks.dataset_rows import gateway_config
from buckeye.mcp.tasks.lock_file import EnvironmentLock, find_lock, parse_image
from buckeye.mcp.tasks.task_files import TASK_FILES, read_task_rows
from buckeye.setup.init.generate import SERVER_KEY
from buckeye.setup.recipe.flags import TrainFlags
from buckeye.setup.recipe.model import SUGGESTED, default_model

_STARTER = Path("tasks.json")
_ANOTHER = "another"
_MODELS = ("*", "models/*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSearch:
    """The flags, the parts found here, and `is_interactive`: True if the user can answer questions."""

    flags: TrainFlags
    found: FoundParts
    is_interactive: bool

    def redirect_output(self) -> AbstractContextManager[Any]:
        """Return a context for the output of other commands: stderr if stdout gets a JSON object."""
        return redirect_stdout(sys.stderr) if self.flags.as_json else nullcontext()


class StarterWrittenError(Exception):
    """A new task file was written, which the user must complete before training is possible."""


def find_config(search: PartSearch) -> Path:
    """Return the configuration of the environment; generate it if none exists. Raises UsageError."""
    flags, found = search.flags, search.found
    if flags.config is not None:
        if flags.config.suffix in (".toml", ".json"):
            raise UsageError(
                f"--config {flags.config}: an environment's configuration is a YAML file. If this is that "
                "of a run, start it with\n"
                f"  buckeye rl @ {flags.config}"
            )
        return flags.config
    if len(found.configs) == 1:
        return found.configs[0]
    if found.configs:
        names = [str(path) for path in found.configs]
        if search.is_interactive:
            return Path(choose("Which environment?", [(name, "") for name in names]))
        raise UsageError(f"which environment? Add --config; there are: {', '.join(names)}")
    return _made_config(search)


def _made_config(search: PartSearch) -> Path:
    from buckeye.cli.init import write_and_try_config
    from buckeye.setup.init.prepare_config import prepare_config  # importing the MCP SDK takes a second

    env, command = _environment(search)
    if env is None and command is None:
        raise UsageError(
            "there is no configuration of an environment here (configs/*.yaml). Either\n"
            "  write one:       buckeye rl init my-env:latest   (an image, a folder, an address, a command)\n"
            "  or name it:      buckeye rl --config FILE.yaml\n"
            "  or begin anew:   buckeye env new my-env --kind mcp"
        )
    if search.flags.dry_run:
        words = f'--command "{command}"' if command is not None else env
        raise UsageError(
            "there is no configuration of an environment here, and --dry-run writes none. To see what would "
            f"be written\n  buckeye rl init {words} --dry-run"
        )
    print(f"There is no configuration in configs/. Looking at {command or env} ...", file=sys.stderr)
    with search.redirect_output():
        prepared = prepare_config(env, command=command)
        if search.is_interactive:
            show_file(prepared.path, prepared.generated.text)
            if not confirm(f"Write {prepared.path}?"):
                raise UsageError(f"{prepared.path} was not written, and without it there is no training")
        proof = write_and_try_config(prepared, try_all=False)
        failed = {trial.action for trial in proof.failed}
        can_continue = bool(prepared.command_without(failed)) and search.is_interactive
        if failed and can_continue and confirm(f"Continue without {', '.join(sorted(failed))}?"):
            tools = [one.tool.name for one in prepared.generated.plan.actions if one.name in failed]
            prepared = prepare_config(env, command=command, exclude=tools, force=True)
            proof = write_and_try_config(prepared, try_all=False)
        if not proof.passed:
            raise UsageError(
                f"the scripted rollout did not go through. Look at {prepared.path}, then type\n  buckeye rl"
            )
    return prepared.path


def _environment(search: PartSearch) -> tuple[str | None, str | None]:
    """Return (environment, command) as `rl init` takes them, or (None, None) if unknown."""
    if search.found.lock is not None or Path("Dockerfile").is_file():
        question = "\nThere is no configs/*.yaml. Write one for the environment in this folder?"
        if not search.is_interactive or confirm(question):
            return ".", None
    elif not search.is_interactive:
        return None, None
    answer = prompt_for_text(
        "Which environment? An image (my-env:latest), a folder, an address (http://...), or a command line"
    )
    if not answer:
        return None, None
    return (None, answer) if _is_command(answer) else (answer, None)


def _is_command(answer: str) -> bool:
    """Return True for a command line: several words, or a program, unless a folder has that name."""
    return not Path(answer).exists() and (" " in answer or shutil.which(answer) is not None)


def find_dataset(search: PartSearch, config: Path) -> str:
    """Return the tasks; make a dataset of them now if they do not name a server. Raises UsageError."""
    name = search.flags.dataset or _found_dataset(search, config)
    path = find_taskset(name)
    if not path.exists():
        raise UsageError(
            f"--dataset {name}: there is no such file or folder (this is {Path.cwd()}). Tasks are a JSON "
            "file, a folder that `buckeye hf --no-push` has written, or ORG/NAME on the Hugging Face hub"
        )
    if is_dataset(path) or search.found.lock is None:
        return name
    rows = [row.value for row in read_task_rows(path) if isinstance(row.value, dict)]
    if all(row.get("mcp_config") is not None for row in rows):
        return name
    return _made_dataset(search, path, f"{config.stem}-tasks")


def _found_dataset(search: PartSearch, config: Path) -> str:
    found = search.found.datasets
    if len(found) == 1:
        return found[0]
    if search.is_interactive:
        if found:
            return choose("Which tasks?", [(name, "") for name in found])
        return _asked_dataset(config)
    if found:
        raise UsageError(f"which tasks? Add --dataset; there are: {', '.join(found)}")
    raise UsageError(
        "there are no tasks here (tasks.json). Add --dataset: a JSON file, a folder that "
        "`buckeye hf --no-push` has written, or ORG/NAME on the Hugging Face hub"
    )


def _asked_dataset(config: Path) -> str:
    answer = prompt_for_text(
        "There are no tasks here. A file, a folder or ORG/NAME on the Hugging Face hub (empty: begin a file)"
    )
    if answer:
        return answer
    prompt = prompt_for_text("What should the model do? One sentence, the prompt of the first task")
    text = json.dumps([_first_task(prompt, load_gym_config(config))], indent=2, ensure_ascii=False) + "\n"
    if prompt:
        show_file(_STARTER, text)
    if not prompt or not confirm(f"Write {_STARTER}?"):
        raise UsageError(f"without tasks there is no training. Write {_STARTER}, or add --dataset")
    write_file(_STARTER, text)
    raise StarterWrittenError(
        f"{_STARTER} has one task. Look at its server and at how the end is graded, add more, then type\n"
        "  buckeye rl"
    )


def _first_task(prompt: str, config: GymConfig) -> dict[str, Any]:
    about = config.job.metadata
    server, image = about.get(SERVER_KEY), parse_image(str(about.get("environment")))
    if server is None and image is not None:
        servers = gateway_config(EnvironmentLock(image=image.tagged))
    else:
        servers = {config.job.name or "environment": server or {"command": "", "args": []}}
    tool = next((action.tool for action in config.actions.values() if action.tool is not None), "evaluate")
    return {"id": "task-001", "prompt": prompt, "mcp_config": servers, "grade": [{"calls": {"tool": tool}}]}


def _made_dataset(search: PartSearch, tasks: Path, name: str) -> str:
    lock = search.found.lock
    assert lock is not None
    if search.flags.dry_run:
        raise UsageError(
            f"{tasks} does not say where its tasks act, and --dry-run makes no dataset of them. Type\n"
            f"  buckeye hf {tasks} --name {name} --no-push"
        )
    if search.is_interactive and not confirm(
        f"\n{tasks} does not say where its tasks act. Make the dataset {name}/ of them, on {lock.image}?"
    ):
        raise UsageError(
            f"{tasks}: tasks need mcp_config. `buckeye hf {tasks} --name {name} --no-push` puts it in"
        )
    with search.redirect_output():
        hf(tasks, name=name, push=False, yes=search.flags.yes)
    return name


def find_model(search: PartSearch, *, on_gpu: bool) -> str:
    """Return the model: given as a flag, chosen by the user, the only one here, or the default.

    The models here are those that no run has written. The default depends on the kind of machine. Raises
    UsageError if there are several and the user cannot be asked.
    """
    named, here = search.flags.model, search.found.models
    if named is not None:
        return named
    usual = default_model(on_gpu=on_gpu)
    if search.is_interactive:
        suggested = sorted(SUGGESTED, key=lambda one: one[0] != usual)
        options = [*((name, "here") for name in here), *suggested, (_ANOTHER, "a name or a folder")]
        chosen = choose("Which model?", options)
        return chosen if chosen != _ANOTHER else prompt_for_text("Model") or usual
    if len(here) > 1:
        raise UsageError(f"which model? Add --model; there are: {', '.join(here)}, and those of the hub")
    return here[0] if here else usual


def ask_machine(flags: TrainFlags, here: str) -> TrainFlags:
    """Ask where to train; return the flags with the answers. `here` describes this machine."""
    options = [("local", f"this machine: {here}")]
    options += [("prime", "rented GPUs; the price is shown first"), ("ssh", "a machine of yours")]
    chosen = choose("Where?", options)
    answers: dict[str, Any] = {"provider": chosen}
    if chosen == "prime":
        answers["gpus"] = prompt_for_text("Which GPUs? [2xA100]") or "2xA100"
    if chosen == "ssh":
        answers["host"] = prompt_for_text("Which host? USER@HOST[:PORT]").split()
        answers["gpus"] = prompt_for_text("Which GPUs has it? As 2xA100 (empty: none)") or None
    return flags.model_copy(update=answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundParts:
    """Parts found in the working directory: paths relative to it, best first."""

    lock: EnvironmentLock | None
    configs: tuple[Path, ...]
    datasets: tuple[str, ...]
    models: tuple[str, ...]


def find_parts() -> FoundParts:
    """Search the working directory, without network. Raises ConfigError for a damaged lock file."""
    lock = find_lock(Path())
    configs = sorted(path for ending in ("*.yaml", "*.yml") for path in Path("configs").glob(ending))
    return FoundParts(
        lock=lock, configs=tuple(configs), datasets=tuple(_datasets(lock)), models=tuple(_models())
    )


def _datasets(lock: EnvironmentLock | None) -> list[str]:
    """Return the lock file's dataset, or else task files, or else folders from `buckeye hf --no-push`."""
    if lock is not None and lock.primary_dataset is not None:
        return [lock.primary_dataset.name]
    files = dict.fromkeys(str(path) for pattern in TASK_FILES for path in sorted(Path().glob(pattern)))
    patterns = ("*/data/*.parquet", "*/*/data/*.parquet")
    folders = {str(path.parent.parent) for pattern in patterns for path in Path().glob(pattern)}
    return list(files) or sorted(folders)


def _models() -> list[str]:
    """Return folders with a trainable model, newest first."""
    found = [path.parent for pattern in _MODELS for path in Path().glob(f"{pattern}/config.json")]
    models = [path for path in found if any(path.glob("*.safetensors"))]
    return [str(path) for path in sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)]
