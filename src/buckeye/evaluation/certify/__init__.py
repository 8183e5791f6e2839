"""Certificate of an environment: which checks it passed, with which files and tasks."""
