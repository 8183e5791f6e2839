"""Trainer: computes gradients from batches, and writes weights and checkpoints. It uses no HTTP."""

import logging

# Other packages import bitsandbytes if it is installed. On a CPU, bitsandbytes then warns that 4-bit kernels
# are missing. Hide this warning, because Buckeye does not use these kernels.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
