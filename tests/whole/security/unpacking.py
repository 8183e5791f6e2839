"""Process that unpacks hostile layers and prints a line of JSON for each.

`python -m tests.whole.security.unpacking FOLDER UID`.

FOLDER holds `NAME.layer` files and their `NAME.digest`; the user UID makes `FOLDER/NAME.root` for each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from buckeye.mcp.images.unpack import unpack_layers
from buckeye.mcp.sandbox.runtime import PrepareError

if __name__ == "__main__":
    folder, uid = Path(sys.argv[1]), int(sys.argv[2])
    if uid != os.getuid():
        os.setgid(uid)
        os.setuid(uid)
    for packed in sorted(folder.glob("*.layer")):
        root = packed.with_suffix(".root")
        root.mkdir()
        digest = packed.with_suffix(".digest").read_text()
        error = None
        try:
            unpack_layers([packed], [digest], root, owner=None)
        except PrepareError as raised:
            error = str(raised)
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0])  # of this program only, unlike ru_maxrss
        print(json.dumps({"name": packed.stem, "error": error, "peak_kib": peak}), flush=True)
