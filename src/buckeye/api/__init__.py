"""The Python API: `buckeye.train`, `buckeye.evaluate`, and the run that they return."""
