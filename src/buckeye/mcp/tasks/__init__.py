"""Tasks as files hold them: reading, checking, and the variables they mention."""
