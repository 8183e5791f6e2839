"""Code that runs in an environment's interpreter: Python 3.10 or newer, standard library only.

In that interpreter it is the package `buckeye_worker_side`, independent of installed packages. Its modules
therefore import each other relatively.
"""
