"""`sdc abft`: the study and the calibration of checksummed products."""

from .calibrate import calibrate
from .options import AbftOptions, ProductsStudyOptions
from .study import study


def abft(options: AbftOptions) -> int:
    """Runs the subcommand and returns the exit code."""
    return study(options.command) if isinstance(options.command, ProductsStudyOptions) else calibrate(options.command)
