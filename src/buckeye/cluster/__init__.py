"""Several hosts for one run: the head has the others start, watch and end processes."""
