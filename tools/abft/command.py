"""`sdc abft`: the study and the calibration of checksummed products."""

from .calibrate import calibrate
from .options import AbftOptions, StudyOptions
from .study import study


def run(options: AbftOptions) -> int:
    """Runs the subcommand and returns the exit code."""
    return study(options.command) if isinstance(options.command, StudyOptions) else calibrate(options.command)
