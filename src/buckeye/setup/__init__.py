"""Write configurations of environments and runs, find a learning rate, build images, run the demo."""
