"""Training: batches become gradients, weights and checkpoints. Imports no environments and no HTTP."""

import logging

# bitsandbytes, if installed, is imported by other packages. On a CPU it warns about 4-bit kernels, which
# Buckeye does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
