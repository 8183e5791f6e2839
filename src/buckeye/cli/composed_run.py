"""`buckeye rl --config ... --dataset ...`: make a configuration from the parts of a run, and start it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

from buckeye.base.disk import free_bytes
from buckeye.base.distribution import missing
from buckeye.base.keys import key
from buckeye.base.storage import write_file
from buckeye.base.terminal import can_prompt, confirm
from buckeye.cli.dry_run import leave_no_files, run_or_show
from buckeye.cli.env_image import push_if_needed
from buckeye.cli.remote import show_remote, start_remote
from buckeye.cli.run_parts import (
    PartSearch,
    StarterWrittenError,
    ask_machine,
    find_config,
    find_dataset,
    find_model,
    find_parts,
)
from buckeye.config.load import load_with_warnings
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, ConfigError, UsageError
from buckeye.launch.preflight.devices import parse_gpu_spec
from buckeye.launch.preflight.disk import estimate_disk
from buckeye.mcp.config import load_gym_config
from buckeye.mcp.environment import McpEnvironment
from buckeye.mcp.grading.task_graders import check_task_graders
from buckeye.mcp.tasks.dataset import find_images
from buckeye.mcp.tasks.trust import ask_for_trust, collect_task_resources, read_taskset
from buckeye.run_files.directory import (
    RUN_FILE,
    files_of_a_run,
    is_in_use,
    is_unstarted,
    lock_directory,
    move_unstarted_run,
)
from buckeye.run_files.known_runs import read_remote_run
from buckeye.setup.recipe.compose import RUN_CONFIG, Recipe, config_text
from buckeye.setup.recipe.flags import TrainArgs, TrainFlags
from buckeye.setup.recipe.model import model_facts, refuse_hosted
from buckeye.setup.recipe.run_plan import RunPlan, plan_json, plan_text
from buckeye.setup.recipe.sizes import choose_sizes
from buckeye.setup.recipe.training_machine import TrainingMachine, devices_text, local_machine, remote_machine

_COMPOSED = "of the run put together here"

Start = Callable[[RLConfig, list[str]], int]


def run_composed(args: TrainArgs, start: Start) -> int:
    """Find or make the parts, show the plan, write the configuration, and `start` it.

    Returns the exit code.
    """
    args.check_composed()
    with leave_no_files() if args.flags.dry_run else nullcontext():
        return _run_of_parts(args, args.flags, start)


def _run_of_parts(args: TrainArgs, flags: TrainFlags, start: Start) -> int:
    found = find_parts()
    if flags.model is not None:
        dataset = flags.dataset or next(iter(found.datasets), "tasks.json")
        config = flags.config or next(iter(found.configs), Path("configs/my-env.yaml"))
        refuse_hosted(flags.model, dataset=dataset, config=str(config))
    place = _place(flags)  # raises before any question or search, if the machine is impossible
    search = PartSearch(
        flags=flags, found=found, is_interactive=can_prompt(yes=flags.yes, as_json=flags.as_json)
    )
    config = find_config(search)  # each part depends on the previous one
    try:
        dataset = find_dataset(search, config)
    except StarterWrittenError as written:
        print(written)
        return 0
    if search.is_interactive and flags.provider is None and place.gpus is None:
        flags = ask_machine(flags, f"{place.cores} cores, no GPU")
        place = _place(flags)
    model = find_model(search, on_gpu=place.gpus is not None)
    plan = _plan(args, flags, place, config, dataset, model)
    if flags.as_json:
        print(json.dumps(plan_json(plan), ensure_ascii=False))
    elif not flags.quiet:
        print(plan_text(plan))
    if not flags.dry_run:
        ask_for_trust(dataset, yes=flags.trust)
    return run_or_show(
        plan.config,
        show=lambda: _show_rest(plan, place, flags),
        start=lambda: _begin(plan, place, flags, start, is_interactive=search.is_interactive),
    )


def _place(flags: TrainFlags) -> TrainingMachine:
    asked = parse_gpu_spec(flags.gpus) if flags.gpus is not None else None
    if flags.provider is not None and flags.provider != "local":
        return remote_machine(flags.provider, asked, flags.host)
    place = local_machine(asked)
    if place.problem is not None and not flags.dry_run:
        raise UsageError(place.problem)
    return place


def _plan(
    args: TrainArgs, flags: TrainFlags, place: TrainingMachine, file: Path, dataset: str, name: str
) -> RunPlan:
    gym = load_gym_config(file)
    tasks, held_out = read_taskset(dataset, check_trust=False)
    if not tasks:
        raise UsageError(f"{dataset} has no tasks to train on: all {len(held_out)} are held out")
    check_task_graders(tasks + held_out, gym)
    McpEnvironment(gym, {"train": tasks, "eval": held_out})  # raises if no rollout could run
    model, evaluated = model_facts(name), [] if flags.no_eval else held_out
    layout, on_gpu = place.layout(model.parameters), place.gpus is not None
    environment = str(gym.job.metadata.get("environment") or gym.job.name or file.stem)
    recipe = Recipe(
        config=file,
        dataset=dataset,
        model=model,
        sizes=choose_sizes(tasks, evaluated, gym, model, on_gpu=on_gpu, requested_seq_len=args.seq_len),
        layout=layout,
        output_dir=_output(flags.output, file.stem),
        wandb=_wandb_project(args, environment),
    )
    text = config_text(recipe, args.settings)
    config = _loaded(text, dry_run=flags.dry_run)
    price = "what your host costs you" if flags.provider == "ssh" else "shown before anything is rented"
    if flags.max_price is not None:
        price += f"; at most {flags.max_price:g} $ an hour"
    return RunPlan(
        recipe=recipe,
        config=config,
        environment=environment,
        actions=tuple(gym.actions),
        images=find_images(tasks + held_out),
        uses=collect_task_resources(tasks + held_out),
        tasks=len(tasks),
        held_out=len(held_out),
        where=f"{place.name}; {devices_text(place, layout, model.parameters)}",
        disk=estimate_disk(config, model.path),
        free=free_bytes(config.output_dir),
        price=price if place.remote else "nothing",
        text=text,
    )


def _wandb_project(args: TrainArgs, environment: str) -> str | None:
    """Return the project in Weights & Biases if its key is set.

    Returns None if the run uses another tracker, or with `--no-wandb`.
    """
    if args.flags.no_wandb or args.selects_tracker or not key("WANDB_API_KEY"):
        return None
    if not args.flags.remote and find_spec("wandb") is None:
        print(f"warning: WANDB_API_KEY is set, but {missing('wandb', 'logging to it')}", file=sys.stderr)
        return None
    name = environment.rpartition("/")[2].partition("@")[0].partition(":")[0]
    return re.sub(r"[^\w.-]+", "-", name) or None


def _output(asked: Path | None, name: str) -> Path:
    """Return an unused folder for the run. Raises UsageError if the requested folder is in use."""
    if asked is not None:
        _refuse_taken(asked)
        return asked
    folders = [Path("outputs", name if number == 1 else f"{name}-{number}") for number in range(1, 10_000)]
    return next(folder for folder in folders if not _taken(folder))


def _taken(folder: Path) -> bool:
    there = bool(files_of_a_run(folder)) or (folder / RUN_CONFIG).exists()
    return there and (is_in_use(folder) or not is_unstarted(folder))


def _refuse_taken(folder: Path) -> None:
    where = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not where.is_dir():
        raise UsageError(f"--output {folder}: {where} is a file. Name a folder")
    if not _taken(folder):
        return
    quoted, instead = shlex.quote(str(folder)), ""
    if (folder / RUN_FILE).exists():
        instead = f"; or go on with that run\n  buckeye rl resume {quoted}"
    elif (folder / RUN_CONFIG).exists():
        instead = f"; or start what is there\n  buckeye rl @ {quoted}/{RUN_CONFIG}"
    raise UsageError(
        f"--output {folder}: a run is there, and nothing is overwritten. Name another folder{instead}"
    )


def _loaded(text: str, *, dry_run: bool) -> RLConfig:
    with tempfile.TemporaryDirectory(prefix="buckeye-rl-") as folder:
        file = Path(folder, RUN_CONFIG)
        file.write_text(text, encoding="utf-8")
        in_it = re.compile(re.escape(str(file)) + r"(:\d+)?")  # temporary, so useless to users
        try:
            config, warnings = load_with_warnings(RLConfig, ["@", str(file), f"--dry-run={dry_run}".lower()])
        except ConfigError as error:
            place = error.at and in_it.sub(_COMPOSED, error.at)
            message = in_it.sub(_COMPOSED, error.message)
            raise ConfigError(message, code=error.code, at=place, hint=error.hint) from None
    for warning in warnings:
        print(f"warning: {in_it.sub(_COMPOSED, warning)}", file=sys.stderr)
    return config


def _show_rest(plan: RunPlan, place: TrainingMachine, flags: TrainFlags) -> None:
    """Show the parts of the plan that matter only if nothing is started."""
    if place.remote and not flags.as_json and not flags.quiet:
        print()
        show_remote(plan.recipe.file, plan.config, flags, text=plan.text)
    if not flags.as_json and not flags.quiet:
        print(f"\n{plan.recipe.file} would be:\n\n{plan.text}")
    if place.problem is not None:
        print(f"warning: {place.problem}", file=sys.stderr)


def _begin(
    plan: RunPlan, place: TrainingMachine, flags: TrainFlags, start: Start, *, is_interactive: bool
) -> int:
    file = plan.recipe.file
    if is_interactive and not confirm("\nStart?"):
        print(f"Nothing was started, and {file} was not written.")
        return 0
    _refuse_taken(file.parent)  # once more: somebody may have thought about the plan for long
    if place.remote:
        push_if_needed(plan.images, is_interactive=is_interactive, yes=flags.yes)
    if is_unstarted(file.parent):
        with lock_directory(file.parent):
            move_unstarted_run(file.parent, also=[file])
    made = [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
    write_file(file, plan.text)
    if not flags.quiet:
        print(f"{file}: written; it starts this run again: buckeye rl @ {file}", file=sys.stderr)
    try:
        if place.remote:
            return start_remote(file, flags)
        return start(plan.config, ["buckeye", "rl", "@", str(file)])
    except (BuckeyeError, KeyboardInterrupt) as error:
        if not place.remote or isinstance(error, UsageError):  # else a message names the file
            _take_back(file, made)
        raise


def _take_back(file: Path, made: Sequence[Path]) -> None:
    """Remove the file of a run that did not start, and the folders that were made for it, so that the next
    try finds no trace. A run with a remote job has started."""
    away = read_remote_run(file.parent)
    if files_of_a_run(file.parent) or (away is not None and away.job is not None):
        return
    file.unlink(missing_ok=True)
    with suppress(OSError):  # there is something else in it
        for folder in made:
            folder.rmdir()
    print(f"{file}: removed again, as the run did not begin", file=sys.stderr)
