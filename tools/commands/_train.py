"""`sdc train`: one copy, the reference that twins are compared with, or one that checks or protects itself."""

from sdc.settings import SettingError
from sdc.train import Running, Training

from .. import TrainOptions, settings_of, usage_errors
from ..conduct import conduct


def run(options: TrainOptions) -> int:
    """Trains and returns the exit code."""
    return conduct(options, Training(**settings_of(options), aggregate=options.aggregate, running=_running(options)))


def _running(options: TrainOptions) -> Running | None:
    if options.checkpoint == "scar":
        return Running(
            fraction=options.checkpoint_fraction, losses=options.lose_shards, local_copies=options.local_copies
        )
    with usage_errors():
        if options.lose_shards:
            raise SettingError("lose_shards", options.lose_shards[0], "needs what gives it back; add --checkpoint scar")
        if options.local_copies is not None:
            raise SettingError("local_copies", str(options.local_copies), "is of --checkpoint scar; add that")
        if options.checkpoint_fraction != TrainOptions.checkpoint_fraction:
            raise SettingError("checkpoint_fraction", options.checkpoint_fraction, "is of --checkpoint scar; add that")
    return None
