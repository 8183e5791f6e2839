"""Environments of others, each in worker processes of its own interpreter.

`WorkerEnvironment` is an ordinary environment to whoever plays it. What runs in the other interpreter lies in
`worker_side/`, needs nothing but the standard library, and imports Buckeye only
for environments that were written for it.
"""
