"""Run pip-audit on the packages in uv.lock, with the vulnerability lists that can be reached.

Reports the lists that could not be reached. Exit code 1 if a known vulnerability is found, else 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

UV = str(Path(sys.executable).with_name("uv"))


def main() -> int:
    """Run the audit and print its results."""
    with tempfile.TemporaryDirectory() as folder:
        named, found = Path(folder, "requirements.txt"), Path(folder, "found.json")
        export = [
            UV,
            "export",
            "--quiet",
            "--frozen",
            "--all-extras",
            "--no-emit-workspace",
            "-o",
            str(named),
        ]
        subprocess.run(export, check=True)
        words = [
            "--disable-pip",
            "--require-hashes",
            "--progress-spinner",
            "off",
            "-f",
            "json",
            "-o",
            str(found),
        ]
        audit = [UV, "tool", "run", "pip-audit", "-r", str(named), *words]
        done = subprocess.run(audit, check=False, capture_output=True, text=True)
        if not found.exists():
            why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            print(f"Nothing was audited: pip-audit could not ask where known holes are listed ({why}).")
            return 0
        packages = json.loads(found.read_text(encoding="utf-8"))["dependencies"]
    audited = [one for one in packages if "vulns" in one]
    for one in audited:
        for hole in one["vulns"]:
            better = ", ".join(hole["fix_versions"]) or "none yet"
            print(f"{one['name']} {one['version']}: {hole['id']}, mended in {better}")
    holes = sum(len(one["vulns"]) for one in audited)
    unknown = len(packages) - len(audited)
    print(f"{holes} known holes in {len(audited)} packages; of {unknown} nothing is known here")
    if not audited:
        print("Nothing was audited: the index that packages come from has no list of known holes.")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
