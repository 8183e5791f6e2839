"""Certificate of an environment: verdicts of all checks, hashes of files and tasks, and a signature."""
