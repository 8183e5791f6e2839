"""Tags and notes on a run and on its rollouts, in `notes.json` beside it: the only thing that is written."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import msgspec

from buckeye.base.storage import write_file
from buckeye.errors import BuckeyeError, UsageError
from buckeye_ui.sources import OpenRun

NOTES_FILE = "notes.json"
_MOST_NOTES = 2_000
_LARGEST_FILE = 32_000_000
_writing = threading.Lock()


class Note(msgspec.Struct, forbid_unknown_fields=True):
    """What somebody noted `of` a rollout (as `train/12/96/3`: split, step, group, number) or, empty, of the
    run. Without tags and text it is removed."""

    of: Annotated[str, msgspec.Meta(max_length=300)] = ""
    text: Annotated[str, msgspec.Meta(max_length=20_000)] = ""
    tags: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=60)]], msgspec.Meta(max_length=30)
    ] = []


def notes(run: OpenRun) -> dict[str, Any]:
    """All notes of a run, by what they are of. What cannot be read is an error, and never overwritten."""
    path = run.place / NOTES_FILE
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path} is too large to be read.")
        found = msgspec.json.decode(path.read_bytes(), type=list[Note])
    except FileNotFoundError:
        found = []
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Mend it, or move it away.") from None
    return {"notes": [msgspec.to_builtins(one) for one in found]}


def write_note(run: OpenRun, note: Note) -> dict[str, Any]:
    """Note it, in place of what was noted of the same before."""
    with _writing:
        kept = [one for one in notes(run)["notes"] if one["of"] != note.of]
        if note.text.strip() or note.tags:
            kept.append(msgspec.to_builtins(note))
        if len(kept) > _MOST_NOTES:
            raise UsageError(f"A run has at most {_MOST_NOTES} notes.")
        try:
            write_file(run.place / NOTES_FILE, msgspec.json.format(msgspec.json.encode(kept), indent=1))
        except OSError as error:
            raise BuckeyeError(f"{run.place / NOTES_FILE} cannot be written: {error.strerror}") from None
    return {"notes": kept}
