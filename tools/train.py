"""`sdc train`: one copy, the reference that twins are compared with, or one that checks its own products."""

from .checked import check_options, describe_run, faults, transform
from .options import TrainOptions
from .output import finish
from .programs import Programs
from .session import Plan, execute


def train(options: TrainOptions) -> int:
    """Trains and returns the exit code."""
    check_options(options, twin=None)
    plan = Plan(
        kind="train",
        programs=lambda config, placement: Programs(
            config,
            placement,
            faults=tuple(faults(options, layers=config.model.layers, twin=None)),
            abft=transform(options),
        ),
        manifest=lambda layers: describe_run(options, layers, twin=None),
    )
    return finish(options, execute(options, plan))
