"""`sdc train`: one copy, the reference that twins are compared with, or one that checks or protects itself."""

from sdc.train.jobs import Training

from ..conduct import conduct, settings_of
from ..options import TrainOptions


def run(options: TrainOptions) -> int:
    """Trains and returns the exit code."""
    return conduct(options, Training(**settings_of(options), aggregate=options.aggregate))
