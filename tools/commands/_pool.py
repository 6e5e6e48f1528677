"""`sdc pool`: three or more hosts compared with each other; the majority names those that differ."""

from .. import PoolOptions, compare, twins_of


def run(options: PoolOptions) -> int:
    """Compares the hosts and returns the exit code."""
    return compare(options, "pool", twins_of(options, options.twins))
