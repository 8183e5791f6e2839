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


if __name__ == "__main__":
    sys.exit(main())
