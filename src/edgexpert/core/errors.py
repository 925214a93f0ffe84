"""The one exception that people see."""


class UserError(Exception):
    """Something the user can put right. Its text says what to do; the CLI prints it as one sentence and exits with code 2.

    Texts begin small, with no name of the user's, and have no full stop, so that they can be part of another sentence. Python
    names that are options on the command line stand in backticks: the CLI writes `k_min` as --k-min.
    """
