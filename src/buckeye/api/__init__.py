"""The Python API: `buckeye.train`, `buckeye.evaluate`, and the object of a run."""
