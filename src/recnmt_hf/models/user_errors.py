"""
Errors that whoever runs the program can mend: the message names the cause and the remedy.

The console command prints the message of these alone; any other exception is a fault of the program and shows where it
came from. The file stands here because configurations and models raise them too, and travel to the Hub without the
rest of the package.
"""


class UserError(ValueError):
    """A value, a file or a combination of options that cannot be right."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that is not there."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder that is there already and must not be overwritten."""
