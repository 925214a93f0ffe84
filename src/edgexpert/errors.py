"""The one exception that people see."""


class UserError(Exception):
    """Something the user can put right. Its text is one sentence that says what to do; the CLI exits with code 2."""
