"""Sites: the places of a step at which tools look, and selectors, which choose among them.

A *site* is one operation of a step's program (an equation that is no loop, branch or call), a `probe`, or an array that
goes into the step or comes out of it. Its direction says in which pass it lies:

=========  ==========================================================================
direction  the value that the site sees
=========  ==========================================================================
fwd        a value of the forward pass; also what is no part of a derivative, such as the optimizer
bwd        a value of the backward pass; of a probe, the cotangent (the gradient with respect to its value)
remat      a value of a forward pass that is recomputed for the backward pass
jvp        a tangent, in a program differentiated in forward mode
arg        an array given to the step: a parameter, a part of the optimizer's state, the batch
out        an array that the step returns
=========  ==========================================================================

Selectors combine with `&`, `|` and `~`:

    primitive("dot_general") & direction("bwd") & scope("*attn*") & iteration(3)

The same line is a selector's text (`parse_selector`), and wherever sites are to be chosen, the text will do.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from sdc._lazy import jnp
from sdc.settings import SettingError
from sdc.text import DEEPEST, expression

from .site import DIRECTIONS, Direction, Site, Where

PROBE = "probe"
COLLECTIVES = (
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all",
    "ragged_all_to_all", "reduce_scatter", "pgather",
)  # fmt: skip


Iteration: TypeAlias = tuple[Any, ...]


class Selector:
    """Chooses sites, and iterations of them; combine selectors with `&`, `|` and `~`.

    A selector is a predicate of sites. Where it asks for an iteration, the predicate says whether any iteration is
    chosen, and `now` which.
    """

    def __init__(
        self,
        text: str,
        chosen: Callable[[Site], bool | None],
        now: Callable[[Site, Iteration], Any] | None = None,
        *,
        terms: Sequence[Selector] = (),
        operator: str = "",
        attribute: Callable[[Site], str] | None = None,
        patterns: Sequence[str] = (),
    ) -> None:
        self.text = text
        self.chosen = chosen
        self.now: Callable[[Site, Iteration], Any] = now or (lambda site, iteration: chosen(site))
        self._terms, self._operator = tuple(terms), operator
        self._attribute, self._patterns = attribute, tuple(patterns)
        self._depth: int = 1 + max((term._depth for term in self._terms), default=-1)
        if self._depth > DEEPEST:
            raise ValueError(
                f"this selector is nested deeper than {DEEPEST} terms, of which each operator of a chain is one; give "
                'several patterns or names to one term, as in named("a", "b")'
            )

    def __call__(self, site: Site) -> bool:
        """Whether the site is chosen, in some iteration at least."""
        return self.chosen(site) is not False

    def __and__(self, other: Where) -> Selector:
        return _combined("&", self, other)

    def __or__(self, other: Where) -> Selector:
        return _combined("|", self, other)

    def __invert__(self) -> Selector:
        def chosen(site: Site) -> bool | None:
            found = self.chosen(site)
            return None if found is None else not found

        def now(site: Site, iteration: Iteration) -> Any:
            found = self.now(site, iteration)
            return not found if isinstance(found, bool) else ~found

        return Selector(f"~{_bracketed(self, '')}", chosen, now, terms=[self])

    def __repr__(self) -> str:
        return self.text

    @staticmethod
    def is_text(text: str) -> bool:
        """Whether a text is meant as a selector, rather than as a pattern of names such as `fwd/attn` or `*`."""
        match = re.match(r"[\s~(]*(\w+)\s*(.?)", text)
        return match is not None and (match[2] == "(" or (match[1] in _WORDS and match[2] in ("", "&", "|", ")")))

    def leaves(self) -> list[Selector]:
        """The terms that this selector combines."""
        return [leaf for term in self._terms for leaf in term.leaves()] if self._terms else [self]

    def near(self, sites: Sequence[Site]) -> list[str]:
        """What the sites have that resembles a pattern of this term."""
        if self._attribute is None:
            return []
        values = list(dict.fromkeys(value for site in sites if (value := self._attribute(site))))
        wanted = [pattern.strip("*").lower() for pattern in self._patterns]

        def resembles(value: str, word: str) -> bool:
            value = value.lower()
            return word in value or bool(difflib.get_close_matches(word, [value, *value.split("/")], 1, 0.6))

        return [value for value in values if any(word and resembles(value, word) for word in wanted)][:4]


def _bracketed(selector: Selector, operator: str) -> str:
    return selector.text if selector._operator in ("", operator) else f"({selector.text})"


def _combined(operator: Literal["&", "|"], left: Selector, right: Where) -> Selector:
    right = as_selector(right)
    decided = operator == "|"  # the truth of one side that settles the whole

    def chosen(site: Site) -> bool | None:
        first = left.chosen(site)
        if first == decided:
            return decided
        second = right.chosen(site)
        return decided if second == decided else None if None in (first, second) else not decided

    def now(site: Site, iteration: Iteration) -> Any:
        a, b = left.now(site, iteration), right.now(site, iteration)
        return a | b if decided else a & b

    text = f" {operator} ".join(_bracketed(part, operator) for part in (left, right))
    return Selector(text, chosen, now, terms=[left, right], operator=operator)


def as_selector(where: Where) -> Selector:
    """A selector from whatever says which sites are meant: itself, its text, or a predicate of sites.

    Raises:
        SettingError: it is none of them.
        ValueError: the text cannot be understood.
    """
    if isinstance(where, str):
        return parse_selector(where)
    if not callable(where):
        raise SettingError("where", where, "expected a selector or its text, as in 'probes & direction(\"bwd\")'")
    return where if isinstance(where, Selector) else Selector(getattr(where, "__name__", "where"), where)


def _matches(name: str, attribute: Callable[[Site], str | None], patterns: Sequence[str]) -> Selector:
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f'{name}{tuple(patterns)}: expected one pattern or more, as in {name}("*attn*")')

    def chosen(site: Site) -> bool:
        value = attribute(site)
        return value is not None and any(fnmatchcase(value, pattern) for pattern in patterns)

    text = f"{name}({', '.join(_quoted(pattern) for pattern in patterns)})"
    return Selector(text, chosen, attribute=lambda site: attribute(site) or "", patterns=patterns)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


everything = Selector("everything", lambda site: True)
"""Selects every site."""

probes = Selector("probes", lambda site: site.primitive == PROBE)
"""Selects every probe."""

operations = Selector("operations", lambda site: site.direction not in ("arg", "out"))
"""Selects everything but the arrays that go into the step and come out of it."""

arithmetic = Selector("arithmetic", lambda site: site.flops > 0)
"""Selects operations that compute floating-point numbers, rather than move them."""

products = Selector(
    "products",
    lambda site: site.is_product and all(jnp.issubdtype(out.dtype, jnp.inexact) for out in site.outputs),
)
"""Selects matrix products and convolutions, but those of integers."""

collectives = Selector("collectives", lambda site: site.primitive in COLLECTIVES)
"""Selects communication between devices: sums, gathers, scatters and permutations over a mesh axis."""


def primitive(*patterns: str) -> Selector:
    """Selects by the name of the JAX primitive: `primitive("dot_general")`, `primitive("exp", "log*")`."""
    return _matches("primitive", lambda site: site.primitive, patterns)


def scope(*patterns: str) -> Selector:
    """Selects by the name stack: `scope("*attn*")`. The whole stack must match, so begin and end with `*`."""
    return _matches("scope", lambda site: site.scope, patterns)


def probed(*patterns: str) -> Selector:
    """Selects probes by the name given to `probe`: `probed("attn")`."""
    return _matches("probed", lambda site: site.probe, patterns)


def source(*patterns: str) -> Selector:
    """Selects by source line, `file:line (function)`: `source("*/model.py:*")`, `source("*(attention)")`."""
    return _matches("source", lambda site: site.source, patterns)


def argument(*patterns: str) -> Selector:
    """Selects arrays given to the step, by their path: `argument("0/params/*")` in the first argument."""
    return _matches("argument", lambda site: site.path if site.direction == "arg" else None, patterns)


def result(*patterns: str) -> Selector:
    """Selects arrays that the step returns, by their path."""
    return _matches("result", lambda site: site.path if site.direction == "out" else None, patterns)


def matching(*patterns: str) -> Selector:
    """Selects by the site's whole name, with or without the number of its repetition."""
    selector = _matches("matching", lambda site: site.name.partition("#")[0], patterns)
    exact = [pattern for pattern in patterns if "#" in pattern]
    return Selector(
        selector.text,
        lambda site: selector(site) or any(fnmatchcase(site.name, pattern) for pattern in exact),
        attribute=lambda site: site.name,
        patterns=patterns,
    )


def named(*names: str) -> Selector:
    """Selects sites by their exact names, as `sdc.sites` lists them."""
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'named{names}: expected one name or more, as in named("fwd/attn")')
    text = f"named({', '.join(map(_quoted, names))})"
    return Selector(text, lambda site: site.name in names, attribute=lambda site: site.name, patterns=names)


def direction(*names: Direction) -> Selector:
    """Selects by direction: `direction("bwd", "remat")`; `sdc.program.selectors` explains the words."""
    if not names or not set(names) <= set(DIRECTIONS):
        raise ValueError(f"direction{names}: expected some of {', '.join(DIRECTIONS)}")
    text = f"direction({', '.join(map(_quoted, names))})"
    return Selector(text, lambda site: site.direction in names, attribute=lambda site: site.direction, patterns=names)


def iteration(*numbers: int, loop: int = -1) -> Selector:
    """Selects iterations of a loop, from 0: of the innermost one, which in a scanned model is the layer.

    Args:
        numbers: the numbers of the iterations.
        loop: which of the enclosing loops, 0 being the outermost and -1 the innermost.
    """
    if not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"iteration{numbers}: expected one number or more, from 0")

    def inside(site: Site) -> bool:
        if not -site.loops <= loop < site.loops:
            return False
        return not site.trips[loop] or any(number < site.trips[loop] for number in numbers)

    def now(site: Site, indices: Iteration) -> Any:
        if not inside(site):
            return False
        found = indices[loop] == numbers[0]
        for number in numbers[1:]:
            found |= indices[loop] == number
        return found

    text = f"iteration({', '.join(map(str, numbers))}{'' if loop == -1 else f', loop={loop}'})"
    return Selector(text, lambda site: None if inside(site) else False, now)


def inside(prefix: str) -> Selector:
    """Selects everything in a scope and in the scopes inside it: `inside("jvp()/attn")`."""
    if not isinstance(prefix, str):
        raise ValueError(f'inside({prefix!r}): expected the name of a scope, as in inside("jvp()/attn")')
    wanted = prefix.split("/") if prefix else []
    return Selector(
        f"inside({_quoted(prefix)})",
        lambda site: site.scope.split("/")[: len(wanted)] == wanted,
        attribute=lambda site: site.scope,
        patterns=[prefix],
    )


def boundary(depth: int) -> Selector:
    """Selects values that leave their scope at this depth or further out: what bisecting looks at first.

    At depth 1 these are the values that pass from one outermost scope to another. Whatever goes wrong inside a scope
    can be seen from outside only through them.
    """
    if depth < 1:
        raise ValueError(f"boundary({depth}): expected a depth of at least 1")
    return Selector(f"boundary({depth})", lambda site: site.leaves <= depth)


_WORDS: dict[str, Selector] = {
    "everything": everything, "probes": probes, "operations": operations, "arithmetic": arithmetic,
    "products": products, "collectives": collectives,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Selector]] = {
    "primitive": primitive, "scope": scope, "probed": probed, "source": source, "argument": argument, "result": result,
    "matching": matching, "named": named, "direction": direction, "iteration": iteration, "inside": inside,
    "boundary": boundary,
}  # fmt: skip


def parse_selector(text: str) -> Selector:
    """A selector from a line of text, written as in Python."""
    return expression(
        "selector", text, words=_WORDS, calls=_CALLS, example='primitive("dot_general") & direction("bwd")'
    )


def no_hits(selector: Selector, sites: Sequence[Site]) -> str:
    """What to say of a selector that hits none of a step's sites, with near misses."""
    hints = []
    for leaf in selector.leaves():
        count = sum(map(leaf, sites))
        near = [] if count else leaf.near(sites)
        alone = f"{leaf.text} alone hits {count:,}" if len(selector.leaves()) > 1 else ""
        like = f"near misses: {', '.join(near)}" if near else ""
        remedy = "name tensors with sdc.probe, or select operations" if leaf is probes and not count else ""
        hints += [hint for hint in (alone, like, remedy) if hint]
    common = ", ".join(f"{name} ×{count}" for name, count in Counter(site.primitive for site in sites).most_common(8))
    return (
        f"selector {selector.text} hits none of the step's {len(sites):,} sites"
        + "".join(f"; {hint}" for hint in hints)
        + f"; the step has {common or 'nothing that depends on its arguments'}"
    )
