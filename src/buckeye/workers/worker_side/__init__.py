"""Code that runs in an environment's interpreter: Python 3.10 or newer, standard library only.

That interpreter loads this folder as the package `buckeye_worker_side`, without an installation. Its modules
therefore import each other relatively.
"""
