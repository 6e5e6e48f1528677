"""`sdc pair`: two hosts compared with each other, or what several such comparisons say together."""

from ..pair_options import PairOptions
from ..pairs import compare, refuse_beside


def run(options: PairOptions) -> int:
    """Compares the hosts and returns the exit code."""
    if options.resolve:
        from ..resolving import resolve

        refuse_beside(options, "resolve", ["json"])
        return resolve(options.resolve, as_json=options.json)
    return compare(options, "pair", 2)
