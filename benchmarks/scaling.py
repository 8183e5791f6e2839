"""What engines that are added to a run bring, and one that is taken away: `rl scale`, 1, 3 and 2 engines.

    python benchmarks/scaling.py --steps 12

Every decode step of an engine takes `--latency` more, in which it computes nothing: as if it had a GPU of its
own. On the cores of one machine alone engines share what there is, and more of them bring nothing.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from buckeye.trainer.model.tiny import TinySize, make_tiny_model

SLOW = """
import sys
if "serve" in sys.orig_argv:
    import time
    from buckeye.inference.engine.engine import Engine
    decode = Engine._decode
    def slow(self):
        time.sleep({latency})
        return decode(self)
    Engine._decode = slow
"""
CONFIG = """
output_dir = "out"
max_steps = 100000
[model]
name = "tiny"
[orchestrator]
batch_size = 32
rollouts_per_example = 4
seq_len = 64
zero_spread = "keep"
[orchestrator.sampling]
max_tokens = 16
[[orchestrator.env]]
id = "letters.py"
[trainer]
[inference]
max_num_seqs = 4
"""
PHASES = (1, 3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of each phase")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of a decode step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    (folder / "sitecustomize.py").write_text(SLOW.format(latency=options.latency))
    shutil.copy(Path(__file__).with_name("letters.py"), folder)
    texts = ["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    make_tiny_model(folder / "tiny", texts=texts, size=size, seed=0)
    env = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "buckeye", "rl"]
    (folder / "rl.toml").write_text(CONFIG)
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen([*command, "@", "rl.toml"], cwd=folder, env=env, stdout=log, stderr=log)
    try:
        for count in PHASES:
            scale = [*command, "scale", "out", "--inference", str(count)]
            if count != PHASES[0]:
                subprocess.run(scale, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
            found = phase(folder / "out" / "metrics.jsonl", run, count, options.steps)
            rates = [step["sampler/tokens_per_second"] for step in found]
            seconds = statistics.median(step["time/total"] for step in found)
            middle, spread = statistics.median(rates), f"{min(rates):.1f} to {max(rates):.1f}"
            print(f"{count} engines: {middle:.1f} tokens/s ({spread}), {seconds:.2f} s a step", flush=True)
    finally:
        run.terminate()
        run.wait()


def phase(path: Path, run: "subprocess.Popen[bytes]", count: int, steps: int) -> list[dict[str, float]]:
    """The records of so many steps with `count` engines, after the first two."""
    while run.poll() is None:
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        found = [record for record in records if record.get("inference/up") == count]
        if len(found) >= steps + 2:
            return found[2:]
        time.sleep(0.5)
    raise SystemExit(f"the run has ended:\n{(path.parent.parent / 'log').read_text()}")


if __name__ == "__main__":
    main()
