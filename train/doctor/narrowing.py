"""Which of many settings make a difference: as few trials as possible, each of which starts processes."""

import functools
from collections.abc import Callable, Sequence

FEW = 8
"""Settings that are tried one by one first, if there are no more: mostly it is one, and a trial tells of all
operations."""


def minimal(names: Sequence[str], holds: Callable[[frozenset[str]], bool]) -> list[str]:
    """The fewest of some settings with which something holds, by halving (QuickXplain).

    Args:
        names: the settings; with all of them it holds.
        holds: whether it does with some of them. What holds with some is taken to hold with more.

    Returns:
        Settings with which it holds, none of which can be left out; empty if it holds without any.

    Example:
        >>> from sdc.train.doctor.narrowing import minimal
        >>> minimal("abcdefgh", lambda some: {"b", "g"} <= some)
        ['b', 'g']

    References:
        U. Junker, QuickXplain: Preferred explanations and relaxations for over-constrained problems, AAAI 2004.
    """

    def go(given: frozenset[str], more: bool, rest: Sequence[str]) -> list[str]:
        if more and holds(given):
            return []
        if len(rest) == 1:
            return list(rest)
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        of_right = go(given | set(left), True, right)
        of_left = go(given | set(of_right), bool(of_right), left)
        return [*of_left, *of_right]

    if not names or holds(frozenset()):
        return []
    return go(frozenset(), False, names)


def explanations(
    names: Sequence[str], operations: Sequence[str], holding: Callable[[frozenset[str]], frozenset[str]]
) -> dict[str, list[str]]:
    """For each operation the settings that explain it.

    Args:
        names: the settings.
        operations: what is to be explained.
        holding: the operations for which something holds with some of the settings; asked once for each choice.

    Returns:
        Operations and the settings that explain them, without those that all settings together do not explain.

    Example:
        >>> from sdc.train.doctor.narrowing import explanations
        >>> causes = {"sort": "a", "sum": "c", "scan": "c", "exp": "nothing known"}
        >>> explanations("abcd", list(causes), lambda some: frozenset(o for o, c in causes.items() if c in some))
        {'sort': ['a'], 'sum': ['c'], 'scan': ['c']}
    """
    ask = functools.cache(holding)
    found: dict[str, list[str]] = {}
    if not names:
        return found
    for operation in operations:
        if operation not in ask(frozenset(names)):
            continue
        alone = [[name] for name in names] if len(names) <= FEW else []
        before = next((some for some in [*found.values(), *alone] if operation in ask(frozenset(some))), None)

        def explained(some: frozenset[str], one: str = operation) -> bool:
            return one in ask(some)

        found[operation] = before or minimal(names, explained)
    return found
