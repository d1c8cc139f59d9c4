"""The error of a program that runs on several ranks."""


class RankError(RuntimeError):
    """A rank failed, ended or hung; the message says which, and shows its traceback or stack."""
