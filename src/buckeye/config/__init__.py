"""Every setting: files and flags become one object, or one message with all that is wrong.

Nothing here acts.
"""
