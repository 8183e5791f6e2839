"""Find environment, tasks, model and machine for `buckeye rl`, in flags and files or by prompts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.columns import quoted
from buckeye.base.storage import write_file
from buckeye.base.terminal import choose, confirm, prompt_for_text, show_file
from buckeye.cli.hf import hf
from buckeye.dataset.built_in import NAMES
from buckeye.dataset.prompts import find_columns
from buckeye.dataset.rows import has_rows, read_splits
from buckeye.errors import UsageError
from buckeye.launch.preflight.model import resolve_run
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
_MODEL_FOLDERS = ("*", "models/*")
_DATASET_KINDS = (
    "a JSON file, a folder that `buckeye hf --no-push` wrote, or ORG/NAME on the Hugging Face hub"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSearch:
    """Flags, and files of the working directory. `is_interactive` is True if the user can answer prompts."""

    flags: TrainFlags
    found: FoundParts
    is_interactive: bool

    def redirect_output(self) -> AbstractContextManager[Any]:
        """Return a context that sends the output of other commands to stderr if stdout gets a JSON object."""
        return redirect_stdout(sys.stderr) if self.flags.as_json else nullcontext()


class StarterWrittenError(Exception):
    """Raised after a new task file was written, because the user must complete the file first."""


def refuse_prompts(name: str) -> None:
    """Raise UsageError if the rows of a dataset are prompts in place of MCP tasks: prompts need a reward."""
    path = find_taskset(name)
    if path.exists() and not has_rows(path) and not path.is_dir():
        return
    splits = read_splits(name)
    rows = next(rows for rows in splits.values() if rows)
    columns = find_columns(name, rows)
    if columns.kind == "tasks":
        return
    answer = f" `{columns.answer}` has answers: try --reward exact first." if columns.answer else ""
    raise UsageError(
        f"{name} has {columns.kind} (column `{columns.prompt}`), and no reward is set",
        code="BK-CLI-MISSING",
        hint=f"Add --reward FILE.py, or a built-in reward: {', '.join(NAMES)}.{answer}",
    )


def find_config(search: PartSearch) -> Path:
    """Return the configuration of the environment; generate it if none exists. Raises UsageError."""
    flags, found = search.flags, search.found
    if flags.config is not None:
        if flags.config.suffix in (".toml", ".json"):
            raise UsageError(
                f"--config {flags.config}: the configuration of an environment is a YAML file",
                code="BK-CLI-ARGUMENT",
                hint=f"If the file configures a run, start it: `buckeye rl @ {flags.config}`",
            )
        return flags.config
    if len(found.configs) == 1:
        return found.configs[0]
    if found.configs:
        names = [str(path) for path in found.configs]
        if search.is_interactive:
            return Path(choose("Which environment?", [(name, "") for name in names]))
        raise _several_found("configurations", "--config", names)
    return _create_config(search)


def _several_found(kind: str, flag: str, names: Sequence[str]) -> UsageError:
    hint = f"Choose one with {flag}"
    return UsageError(f"several {kind} found: {', '.join(names)}", code="BK-CLI-MISSING", hint=hint)


def _create_config(search: PartSearch) -> Path:
    from buckeye.cli.init import write_and_try_config
    from buckeye.setup.init.prepare_config import prepare_config  # importing the MCP SDK takes a second

    env, command = _environment_argument(search)
    missing = "no environment configuration found (configs/*.yaml)"
    if env is None and command is None:
        raise UsageError(
            missing,
            code="BK-CLI-MISSING",
            hint="Use one of\n"
            "  prompts and reward:  buckeye rl --model MODEL --dataset FILE --reward FILE.py\n"
            "  create one:          buckeye rl init my-env:latest   (an image, folder, URL or command)\n"
            "  name the file:       buckeye rl --config FILE.yaml\n"
            "  new environment:     buckeye env new my-env --kind mcp",
        )
    if search.flags.dry_run:
        argument = f'--command "{command}"' if command is not None else env
        raise UsageError(
            f"{missing}, and --dry-run writes none",
            code="BK-CLI-MISSING",
            hint=f"To see the file: `buckeye rl init {quoted(argument)} --dry-run`",
        )
    print(f"No configuration found in configs/. Reading the tools of {command or env} ...", file=sys.stderr)
    with search.redirect_output():
        prepared = prepare_config(env, command=command)
        if search.is_interactive:
            show_file(prepared.path, prepared.generated.text)
            if not confirm(f"Write {prepared.path}?"):
                hint = "Write it, or name another one with --config"
                raise UsageError(f"{prepared.path} was not written", code="BK-CLI-MISSING", hint=hint)
        result = write_and_try_config(prepared, try_all=False)
        failed = {trial.action for trial in result.failed}
        can_continue = bool(prepared.command_without(failed)) and search.is_interactive
        if failed and can_continue and confirm(f"Continue without {', '.join(sorted(failed))}?"):
            actions = prepared.generated.plan.actions
            tools = [action.tool.name for action in actions if action.name in failed]
            prepared = prepare_config(env, command=command, exclude=tools, force=True)
            result = write_and_try_config(prepared, try_all=False)
        if not result.passed:
            hint = f"Check {prepared.path}, then run `buckeye rl` again"
            raise UsageError("the trial failed", code="BK-ENV-FAILED", hint=hint)
    return prepared.path


def _environment_argument(search: PartSearch) -> tuple[str | None, str | None]:
    """Return (environment, command) as `rl init` takes them, or (None, None) if unknown."""
    if search.found.lock is not None or Path("Dockerfile").is_file():
        question = "\nNo configs/*.yaml found. Write one for the environment in this folder?"
        if not search.is_interactive or confirm(question):
            return ".", None
    elif not search.is_interactive:
        return None, None
    answer = prompt_for_text(
        "Which environment? An image (my-env:latest), a folder, a URL (http://...), or a command line"
    )
    if not answer:
        return None, None
    return (None, answer) if _is_command(answer) else (answer, None)


def _is_command(answer: str) -> bool:
    """Return True for a command line: several words, or a program, unless a path has that name."""
    return not Path(answer).exists() and (" " in answer or shutil.which(answer) is not None)


def find_dataset(search: PartSearch, config: Path) -> str:
    """Return the name or path of the dataset. Raises UsageError.

    If tasks do not name a server, write a dataset of these tasks with the server of the lock file.
    """
    name = search.flags.dataset or _choose_dataset(search, config)
    path = find_taskset(name)
    if not path.exists():
        raise UsageError(
            f"--dataset: no file or folder {name} in {Path.cwd()}",
            code="BK-DATA-NOT-FOUND",
            hint=f"Name {_DATASET_KINDS}",
        )
    if is_dataset(path) or search.found.lock is None:
        return name
    rows = [row.value for row in read_task_rows(path) if isinstance(row.value, dict)]
    if all(row.get("mcp_config") is not None for row in rows):
        return name
    return _create_dataset(search, path, f"{config.stem}-tasks")


def _choose_dataset(search: PartSearch, config: Path) -> str:
    names = search.found.datasets
    if len(names) == 1:
        return names[0]
    if search.is_interactive:
        return choose("Which tasks?", [(name, "") for name in names]) if names else _prompt_for_tasks(config)
    if names:
        raise _several_found("task files", "--dataset", names)
    hint = f"Add --dataset: {_DATASET_KINDS}"
    raise UsageError("no tasks found (tasks.json)", code="BK-CLI-MISSING", hint=hint)


def _prompt_for_tasks(config: Path) -> str:
    answer = prompt_for_text(
        "No tasks found. A file, a folder or ORG/NAME on the Hugging Face hub (empty: create a file)"
    )
    if answer:
        return answer
    prompt = prompt_for_text("What should the model do? One sentence, the prompt of the first task")
    text = json.dumps([_first_task(prompt, load_gym_config(config))], indent=2, ensure_ascii=False) + "\n"
    if prompt:
        show_file(_STARTER, text)
    if not prompt or not confirm(f"Write {_STARTER}?"):
        hint = f"Write {_STARTER}, or add --dataset"
        raise UsageError("no tasks to train on", code="BK-CLI-MISSING", hint=hint)
    write_file(_STARTER, text)
    raise StarterWrittenError(
        f"{_STARTER}: written with one task. Check its server and its grading, add tasks, then run\n"
        "  buckeye rl"
    )


def _first_task(prompt: str, config: GymConfig) -> dict[str, Any]:
    metadata = config.job.metadata
    server, image = metadata.get(SERVER_KEY), parse_image(str(metadata.get("environment")))
    if server is None and image is not None:
        servers = gateway_config(EnvironmentLock(image=image.tagged))
    else:
        servers = {config.job.name or "environment": server or {"command": "", "args": []}}
    tool = next((action.tool for action in config.actions.values() if action.tool is not None), "evaluate")
    return {"id": "task-001", "prompt": prompt, "mcp_config": servers, "grade": [{"calls": {"tool": tool}}]}


def _create_dataset(search: PartSearch, tasks: Path, name: str) -> str:
    lock = search.found.lock
    assert lock is not None
    if search.flags.dry_run:
        raise UsageError(
            f"{tasks}: tasks have no `mcp_config`, and --dry-run does not add it",
            code="BK-ENV-TASKS",
            hint=f"Add it: `buckeye hf {quoted(tasks)} --name {name} --no-push`",
        )
    if search.is_interactive and not confirm(
        f"\n{tasks} has no servers (mcp_config). Write the dataset {name}/ with the server {lock.image}?"
    ):
        hint = f"Add it: `buckeye hf {quoted(tasks)} --name {name} --no-push`"
        raise UsageError(f"{tasks}: tasks have no `mcp_config`", code="BK-ENV-TASKS", hint=hint)
    with search.redirect_output():
        hf(tasks, name=name, push=False, yes=search.flags.yes)
    return name


def find_model(search: PartSearch, *, on_gpu: bool) -> str:
    """Return the model: given as a flag, chosen by the user, the only local one, or the default.

    Local models are in the working directory or in `models/`, not in the output of a run. The default
    depends on the kind of machine. Raises UsageError if several local models exist and the user cannot
    answer prompts.
    """
    requested, local = search.flags.model, search.found.models
    if requested is not None:
        return resolve_run(requested)
    default = default_model(on_gpu=on_gpu)
    if search.is_interactive:
        suggested = sorted(SUGGESTED, key=lambda model: model[0] != default)
        options = [*((name, "local") for name in local), *suggested, (_ANOTHER, "a name or a folder")]
        chosen = choose("Which model?", options)
        return chosen if chosen != _ANOTHER else prompt_for_text("Model") or default
    if len(local) > 1:
        raise _several_found("models", "--model", local)
    return local[0] if local else default


def ask_machine(flags: TrainFlags, local: str) -> TrainFlags:
    """Prompt for the machine; return the flags with the answers. `local` describes this machine."""
    options = [("local", f"this machine: {local}")]
    options += [("prime", "rented GPUs; the price is shown first"), ("ssh", "your own machine")]
    chosen = choose("Where?", options)
    answers: dict[str, Any] = {"provider": chosen}
    if chosen == "prime":
        answers["gpus"] = prompt_for_text("Which GPUs? [2xA100]") or "2xA100"
    if chosen == "ssh":
        answers["host"] = prompt_for_text("Which host? USER@HOST[:PORT]").split()
        answers["gpus"] = prompt_for_text("Which GPUs does it have? Such as 2xA100 (empty: none)") or None
    return flags.model_copy(update=answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundParts:
    """Parts found in the working directory, as paths relative to it. The newest model is first."""

    lock: EnvironmentLock | None
    configs: tuple[Path, ...]
    datasets: tuple[str, ...]
    models: tuple[str, ...]


def find_parts() -> FoundParts:
    """Search the working directory, without network. Raises ConfigError for a damaged lock file."""
    lock = find_lock(Path())
    configs = sorted(path for pattern in ("*.yaml", "*.yml") for path in Path("configs").glob(pattern))
    return FoundParts(
        lock=lock, configs=tuple(configs), datasets=tuple(_find_datasets(lock)), models=tuple(_find_models())
    )


def _find_datasets(lock: EnvironmentLock | None) -> list[str]:
    """Return the lock file's dataset, or else task files, or else folders from `buckeye hf --no-push`."""
    if lock is not None and lock.primary_dataset is not None:
        return [lock.primary_dataset.name]
    files = dict.fromkeys(str(path) for pattern in TASK_FILES for path in sorted(Path().glob(pattern)))
    patterns = ("*/data/*.parquet", "*/*/data/*.parquet")
    folders = {str(path.parent.parent) for pattern in patterns for path in Path().glob(pattern)}
    return list(files) or sorted(folders)


def _find_models() -> list[str]:
    """Return folders with a trainable model, newest first."""
    folders = [path.parent for pattern in _MODEL_FOLDERS for path in Path().glob(f"{pattern}/config.json")]
    models = [path for path in folders if any(path.glob("*.safetensors"))]
    return [str(path) for path in sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)]
