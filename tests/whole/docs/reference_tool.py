"""The program tools/reference.py as a module."""

import importlib.util

from tests.places import ROOT

_spec = importlib.util.spec_from_file_location("reference_tool", ROOT / "tools" / "reference.py")
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)
