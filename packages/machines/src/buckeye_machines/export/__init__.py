"""Files that let other systems carry out a run: SkyPilot, Kubernetes."""
