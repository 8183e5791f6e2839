"""What every other room stands on: processes, files, secrets, HTTP, what is installed.

Of Buckeye only the errors are imported here, and nothing here knows what a run is.
"""
