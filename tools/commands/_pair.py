"""`sdc pair`: two hosts compared with each other, or what several such comparisons say together."""

from .. import PairOptions, compare, refuse_beside


def run(options: PairOptions) -> int:
    """Compares the hosts and returns the exit code."""
    if options.resolve:
        from .. import resolve

        refuse_beside(options, "resolve", ["json"])
        return resolve(options.resolve, as_json=options.json)
    return compare(options, "pair", 2)
