"""Batches become gradients, weights and checkpoints. No environment is known here, and no HTTP."""

import logging

# Where it is installed, others import it too, and on a CPU it warns of 4-bit kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
