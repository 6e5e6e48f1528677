"""`sdc twin`: lock-step twins, compared bit for bit."""

from sdc.train import Twins

from .. import TwinOptions, settings_of
from ..conduct import conduct


def run(options: TwinOptions) -> int:
    """Runs twins and returns the exit code."""
    return conduct(
        options,
        Twins(
            **settings_of(options), twins=options.twins, sync=options.sync, compare=options.compare,
            exchange=options.exchange,
            placement=options.placement, require_processes=options.require_processes,
            least_elements=options.least_elements,
        ),
    )  # fmt: skip
