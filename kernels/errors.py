"""The exceptions a user may meet: few, typed, and each with the exit code the command line returns.

Every message carries the offending value, what was expected, where it was found, and what to do.
`assert` is for our own bugs; these are for everything a user, a file or a backend can get wrong.
They live in the lowest layer because every folder may import it.
"""

from __future__ import annotations


class SeekforgeError(Exception):
    """Base of all errors meant for users."""

    exit_code = 1


class InputError(SeekforgeError):
    """An option, a prompt, a path or a request that cannot be served as given."""

    exit_code = 2


class CheckpointError(InputError):
    """The checkpoint is missing, incomplete, damaged, or of a kind not supported."""


class EngineError(InputError):
    """The engine directory is damaged, of another version, or does not fit this machine."""


class BuildError(SeekforgeError):
    """A step of the build could not be done: export, a pass, or a backend's lowering."""
