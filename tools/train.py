"""`sdc train`: one copy, the reference that twins are compared with."""

from .options import TrainOptions
from .output import finish
from .programs import Programs
from .session import Plan, execute


def train(options: TrainOptions) -> int:
    """Trains and returns the exit code."""
    return finish(options, execute(options, Plan(kind="train", programs=Programs)))
