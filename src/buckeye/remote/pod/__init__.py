"""Programs for the other machine. They need only the standard library, because they arrive first."""
