"""What a user can cause, each with the exit code of the command that meets it.

Every message says three things: the value, the rule it breaks, and what to do.
``gpt.exits.exit_code`` prints it on stderr without a traceback and exits with the code.
"""


class UsageError(ValueError):
    """Wrong usage or unusable data."""

    exit_code = 2


class NonFiniteError(UsageError):
    """A loss, gradient or logit is NaN or infinite."""

    exit_code = 3


class CheckpointError(UsageError):
    """No usable checkpoint: missing, damaged, hostile, or of another model."""

    exit_code = 4


class FolderInUseError(UsageError):
    """Another process is training in this run folder."""

    exit_code = 5


class DiskError(UsageError):
    """The disk is full or refuses to be written."""

    exit_code = 6
