"""On PYTHONPATH, hides the satellites of this checkout: what is tested then is the core alone."""

import sys
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parents[2] / "packages")
sys.path[:] = [folder for folder in sys.path if not folder.startswith(_PACKAGES)]
