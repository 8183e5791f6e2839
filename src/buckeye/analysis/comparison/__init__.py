"""Two runs beside each other: what is different, and which one is better."""
