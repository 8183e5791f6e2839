"""Run pip-audit on the packages in uv.lock, with the vulnerability lists that can be reached.

Reports the lists that could not be reached. Exit code 1 if a known vulnerability is found, else 0.
`audit.py licenses [EXTRA ...]` prints the license of each package of the extras instead (default: `train`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

UNKNOWN = "unknown"
UV = str(Path(sys.executable).with_name("uv"))


def main() -> int:
    """Run the audit or list the licenses, and print the results."""
    if sys.argv[1:2] == ["licenses"]:
        return print_licenses(sys.argv[2:] or ["train"])
    with tempfile.TemporaryDirectory() as folder:
        requirements, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        export = [UV, "export", "--quiet", "--frozen", "--all-extras", "--no-emit-workspace", "-o"]
        subprocess.run([*export, str(requirements)], check=True)
        options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "-f", "json", "-o"]
        audit = [UV, "tool", "run", "pip-audit", "-r", str(requirements), *options, str(report)]
        result = subprocess.run(audit, check=False, capture_output=True, text=True)
        if not report.exists():
            reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
            print(f"audit skipped: pip-audit cannot reach a list of vulnerabilities: {reason}")
            return 0
        packages = json.loads(report.read_text(encoding="utf-8"))["dependencies"]
    audited = [package for package in packages if "vulns" in package]
    for package in audited:
        for vulnerability in package["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    count = sum(len(package["vulns"]) for package in audited)
    unaudited = len(packages) - len(audited)
    print(f"{count} known vulnerabilities in {len(audited)} packages; {unaudited} not audited")
    if not audited:
        print("audit skipped: the package index has no list of vulnerabilities")
    return 1 if count else 0


def print_licenses(extras: list[str]) -> int:
    """Print name, version and license of the packages of the extras; return 1 if a license is unknown.

    Packages for other platforms are not installed, so their licenses are not known here.
    """
    options = [word for extra in extras for word in ("--extra", extra)]
    export = [UV, "export", "--quiet", "--frozen", "--no-dev", "--no-hashes", "--no-emit-workspace", *options]
    lines = subprocess.run(export, check=True, capture_output=True, text=True).stdout.splitlines()
    pinned = (line for line in lines if "==" in line and not line.startswith((" ", "#")))
    names = dict.fromkeys(line.partition("==")[0] for line in pinned)
    counts: Counter[str] = Counter()
    for name in names:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            counts["not installed here"] += 1
            continue
        license_name = license_of(found)
        counts[license_name] += 1
        print(f"{name:<32}{found.version:<16}{license_name}")
    print("\n" + "\n".join(f"{count:>4}  {license_name}" for license_name, count in counts.most_common()))
    return 1 if UNKNOWN in counts else 0


def license_of(package: metadata.Distribution) -> str:
    """Return the license of a package: the expression, classifiers or name in its metadata, or its file."""
    found = package.metadata
    if expression := found.get("License-Expression"):
        return expression
    classified = [line for line in found.get_all("Classifier") or () if line.startswith("License ::")]
    if names := [line.rpartition(" :: ")[2] for line in classified if line != "License :: OSI Approved"]:
        return " AND ".join(names)
    files = [path for path in package.files or () if path.name.upper().startswith(("LICENSE", "LICENCE"))]
    texts = [found.get("License") or "", *(path.read_text() for path in files)]
    return next((text.split("\n")[0].strip()[:60] for text in map(str.strip, texts) if text), UNKNOWN)


if __name__ == "__main__":
    sys.exit(main())
