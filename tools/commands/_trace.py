"""`sdc trace`: the digests of every step of a run, for comparison with another run's, at once or later."""

from sdc.train import Tracing

from .. import TraceOptions, settings_of
from ..conduct import conduct


def run(options: TraceOptions) -> int:
    """Traces a run and returns the exit code."""
    job = Tracing(
        **settings_of(options), where=options.where, against=options.against, simulate=options.simulate
    )  # fmt: skip
    return conduct(options, job)
