"""Run the catalogue and report the findings: `python -m tests.analysis.diagnosis.measure DIR`."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import torch
from tests.analysis.diagnosis.catalogue import FAULTS, HEALTHY
from tests.analysis.diagnosis.small_runs import play, warm_model

from buckeye.analysis.diagnosis.diagnose import diagnose


def main(root: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    root.mkdir(exist_ok=True, parents=True)
    warm = root / "sft/weights/step_60"
    if not warm.exists():
        warm_model(root)
    everything = {**FAULTS, **HEALTHY}
    for name in chosen or everything:
        one = everything[name]
        folder = root / "".join(letter if letter.isalnum() else "-" for letter in name)
        begun = time.time()
        try:
            if not (folder / "run" / "metrics.jsonl").exists():
                folder.mkdir(exist_ok=True)
                if name in FAULTS:
                    play(folder / "run", one.model(warm, folder), one.small, one.plant())
                else:
                    play(folder / "run", warm, one)
        except Exception:
            traceback.print_exc()
            print("FAILED TO RUN", name, flush=True)
            continue
        played = time.time()
        try:
            found = diagnose(folder / "run", tests=name == "tokenizer of another model").findings
        except Exception:
            traceback.print_exc()
            print("FAILED TO DIAGNOSE", name, flush=True)
            continue
        accused = [one for one in found if one.confidence != "possible"]
        right = bool(accused) and accused[0].name in FAULTS[name].names if name in FAULTS else not accused
        print(
            "ok   " if right else "WRONG", f"{name:32}", [f"{f.name}({f.confidence})" for f in found],
            f"{played - begun:.1f} s, {time.time() - played:.1f} s", flush=True,
        )  # fmt: skip
        if not right:
            for one in found:
                print("      ", one.name, str(one)[:400], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
