"""Sites, which are the places in a step that tools observe, and selectors, which choose among sites.

A *site* is one operation of a step's program (an equation other than a loop, branch or call), a `probe`, or an array
that enters or leaves the step. The direction of a site is the pass to which the site belongs:

=========  ==========================================================================
direction  value at the site
=========  ==========================================================================
fwd        a value of the forward pass, or of a part outside any derivative, such as the optimizer
bwd        a value of the backward pass; for a probe, the cotangent (the gradient with respect to its value)
remat      a value of a forward pass that is recomputed for the backward pass
jvp        a tangent, in a program differentiated in forward mode
arg        an array given to the step: a parameter, a part of the optimizer's state, the batch
out        an array that the step returns
saved      a value that the forward pass saves for the backward pass; such a site exists only for a selector that
           names it, by `direction("saved")` or `matching("saved/*")`
=========  ==========================================================================

Selectors combine with `&`, `|` and `~`:

    primitive("dot_general") & direction("bwd") & scope("*attn*") & iteration(3)

The text of a selector (`as_selector`) is such an expression. Every function that takes a selector also accepts the text
of one.
"""

from __future__ import annotations

import dataclasses
import difflib
import html
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from sdc._lazy import jnp
from sdc.settings import SettingError
from sdc.text import DEEPEST, expression

if TYPE_CHECKING:
    import jax

Direction: TypeAlias = Literal["fwd", "bwd", "remat", "jvp", "arg", "out", "saved"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PRODUCTS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul_wrapper", "scaled_matmul",
    "bcoo_dot_general", "bcsr_dot_general",
)  # fmt: skip


class Tags:
    """Names in rewritten programs by which the tools of this library recognize their own operations."""

    HIDDEN = "sdc.hidden"  # scope of a rule's own computation
    RARELY = "sdc.rarely"  # scope of operations that run only after a mismatch, which estimates omit
    KERNEL = "sdc_kernel"  # common name of all TPU kernels, since the compiler dumps instructions for one name only
    PRODUCT = "sdc_product"  # kernels that compute a matrix product; the value is the contracted axis of each factor


@dataclasses.dataclass(frozen=True, repr=False)
class Site:
    """One place in a step.

    Attributes:
        name: the key of the site's report, unique in a step: `direction/probe` for a probe, `direction/scope/primitive`
            for any other operation, `arg/path` and `out/path` for the step's own arrays. A second site with the same
            name gets the suffix `#2`.
        primitive: name of the JAX primitive; `argument`, `result` or `saved` for arrays that enter or leave the step or
            are saved for its backward pass.
        direction: the pass to which the site belongs; see `sdc.program.selectors`.
        probe: the name given to `probe`, or None.
        scope: the name stack (`jax.named_scope` and transformations), outermost first.
        source: `file:line (function)` in the user's code, or an empty string.
        dims: names of the leading axes that control flow adds to a report, outermost first: a mesh axis, or `scan`.
        trips: number of iterations of each enclosing loop, outermost first; 0 for a `while`, whose number of iterations
            is unknown.
        mesh: names and sizes of the enclosing mesh axes.
        outputs: shapes and dtypes of the values, on one device and for one iteration.
        inputs: shapes and dtypes of the factors and other inputs of a matrix product; empty for other operations.
        flops: number of floating-point operations in one evaluation on one device; see `flop_counts.flops`.
        products: number of operations in the site's matrix products, including integer products; None if unknown, as in
            foreign code.
        order: place of the site in the program: the numbers of the enclosing equations and of the site's own equation,
            with `"scan"`, `"reversed"` or `"while"` for each enclosing loop.
        leaves: the depth at which the value leaves its scope. This depth is one more than the smallest number of
            scopes, counted from the outermost, that the value shares with a reader.
    """

    name: str
    primitive: str
    direction: Direction
    probe: str | None = None
    scope: str = ""
    source: str = ""
    dims: tuple[str, ...] = ()
    trips: tuple[int, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    outputs: tuple[jax.ShapeDtypeStruct, ...] = ()
    inputs: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(default=(), compare=False)  # traces do not store them
    flops: int = 0
    products: int | None = dataclasses.field(default=0, compare=False)
    order: tuple[int | str, ...] = ()
    leaves: int = 1

    @property
    def loops(self) -> int:
        """Number of enclosing loops (`scan` and `while`)."""
        return len(self.trips)

    @property
    def runs(self) -> int:
        """Number of evaluations in a step, on all devices of the site's meshes; a `while` counts as one iteration."""
        return math.prod(trips or 1 for trips in self.trips) * math.prod(size for _, size in self.mesh)

    @property
    def work(self) -> int:
        """Number of floating-point operations in a step, on all devices; see `runs`."""
        return self.runs * max(self.flops, self.products or 0)

    @property
    def is_product(self) -> bool:
        """Whether the operation is a matrix product or a convolution."""
        return self.primitive in PRODUCTS

    @property
    def path(self) -> str | None:
        """Path of the array in the step's arguments or results; None for other sites."""
        return self.name.partition("/")[2] if self.direction in ("arg", "out") else None

    def __repr__(self) -> str:
        return f"Site({self})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(str(self))}</code>"

    def __str__(self) -> str:
        shapes = " ".join(f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in self.outputs)
        sizes = iter(trips for trips in self.trips if trips)
        names = (f"{name} {dict(self.mesh)[name] if name != 'scan' else next(sizes)}" for name in self.dims)
        axes = f" by {' × '.join(names)}" if self.dims else ""
        return f"{self.name}  {shapes}{axes}  {self.flops:,} FLOP  {self.source}".rstrip()


class Skipped(NamedTuple):
    """A site that a tool could not handle."""

    site: Site  # the site
    reason: str  # why the tool could not handle the site
    # Share of the site's matrix products in the step's floating-point operations; None if unknown
    share: float | None = None


Predicate: TypeAlias = Callable[[Site], bool]
Where: TypeAlias = Predicate | str
"""A choice of sites: a selector, the text of a selector, or any predicate of sites."""


PROBE = "probe"
COLLECTIVES = (
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all",
    "ragged_all_to_all", "reduce_scatter", "pgather",
)  # fmt: skip


Iteration: TypeAlias = tuple[Any, ...]


class Selector:
    """A choice of sites and of their iterations; combine selectors with `&`, `|` and `~`.

    A selector is a predicate of sites. If the selector chooses iterations, the predicate returns whether any iteration
    is chosen, and `now` returns whether a given iteration is.
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
                f"this selector is nested deeper than {DEEPEST} levels (each operator in a chain adds one); give "
                'several patterns or names to one term, as in named("a", "b")'
            )

    def __call__(self, site: Site) -> bool:
        """Returns whether the site is chosen in at least one iteration."""
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
        """Returns whether a string is a selector rather than a pattern of names such as `fwd/attn` or `*`."""
        match = re.match(r"[\s~(]*(\w+)\s*(.?)", text)
        return match is not None and (match[2] == "(" or (match[1] in _WORDS and match[2] in ("", "&", "|", ")")))

    def leaves(self) -> list[Selector]:
        """Returns the terms that this selector combines."""
        return [leaf for term in self._terms for leaf in term.leaves()] if self._terms else [self]

    @property
    def names_saved(self) -> bool:
        """Whether this selector selects values that are saved for the backward pass."""
        patterns = (pattern for leaf in self.leaves() for pattern in leaf._patterns)
        return any(pattern.partition("/")[0] == "saved" for pattern in patterns)

    def near(self, sites: Sequence[Site]) -> list[str]:
        """Returns attributes of the sites that resemble one of this term's patterns."""
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
    decided = operator == "|"  # the value of one side that determines the result

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
    """Converts a string or a predicate of sites to a selector; a selector is returned unchanged.

    Raises:
        SettingError: the argument is none of these.
        ValueError: the text cannot be parsed.
    """
    if isinstance(where, str):
        example = 'primitive("dot_general") & direction("bwd")'
        return expression("selector", where, words=_WORDS, calls=_CALLS, example=example)
    if not callable(where):
        raise SettingError("where", where, "expected a selector or its text, as in 'probes & direction(\"bwd\")'")
    return where if isinstance(where, Selector) else Selector(getattr(where, "__name__", "where"), where)


def _term(
    name: str, patterns: Sequence[str], chosen: Callable[[Site], bool], attribute: Callable[[Site], str]
) -> Selector:
    quoted = ('"' + pattern.replace("\\", "\\\\").replace('"', '\\"') + '"' for pattern in patterns)
    return Selector(f"{name}({', '.join(quoted)})", chosen, attribute=attribute, patterns=patterns)


def _matches(name: str, attribute: Callable[[Site], str | None], patterns: Sequence[str]) -> Selector:
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f'{name}{tuple(patterns)}: expected at least one pattern, as in {name}("*attn*")')

    def chosen(site: Site) -> bool:
        value = attribute(site)
        return value is not None and any(fnmatchcase(value, pattern) for pattern in patterns)

    return _term(name, patterns, chosen, lambda site: attribute(site) or "")


everything = Selector("everything", lambda site: True)
"""Selects every site."""

probes = Selector("probes", lambda site: site.primitive == PROBE)
"""Selects every probe."""

operations = Selector("operations", lambda site: site.direction not in ("arg", "out", "saved"))
"""Selects all sites other than the arrays that enter and leave the step or are saved for its backward pass."""

arithmetic = Selector("arithmetic", lambda site: site.flops > 0)
"""Selects operations that compute floating-point numbers rather than move them."""

products = Selector(
    "products", lambda site: site.is_product and all(jnp.issubdtype(out.dtype, jnp.inexact) for out in site.outputs)
)
"""Selects matrix products and convolutions, except integer ones."""

collectives = Selector("collectives", lambda site: site.primitive in COLLECTIVES)
"""Selects communication between devices: sums, gathers, scatters and permutations over a mesh axis."""


def primitive(*patterns: str) -> Selector:
    """Selects by the name of the JAX primitive: `primitive("dot_general")`, `primitive("exp", "log*")`."""
    return _matches("primitive", lambda site: site.primitive, patterns)


def scope(*patterns: str) -> Selector:
    """Selects by the name stack: `scope("*attn*")`. The pattern must match the whole stack, so put `*` at both ends."""
    return _matches("scope", lambda site: site.scope, patterns)


def probed(*patterns: str) -> Selector:
    """Selects probes by the name given to `probe`: `probed("attn")`."""
    return _matches("probed", lambda site: site.probe, patterns)


def source(*patterns: str) -> Selector:
    """Selects by source line, `file:line (function)`: `source("*/model.py:*")`, `source("*(attention)")`."""
    return _matches("source", lambda site: site.source, patterns)


def argument(*patterns: str) -> Selector:
    """Selects arrays given to the step, by their path: `argument("0/params/*")` selects parts of the first argument."""
    return _matches("argument", lambda site: site.path if site.direction == "arg" else None, patterns)


def result(*patterns: str) -> Selector:
    """Selects arrays that the step returns, by their path."""
    return _matches("result", lambda site: site.path if site.direction == "out" else None, patterns)


def matching(*patterns: str) -> Selector:
    """Selects by the site's whole name, with or without the number at the end of the name, such as `#2`."""
    selector = _matches("matching", lambda site: site.name.partition("#")[0], patterns)
    exact = [pattern for pattern in patterns if "#" in pattern]

    def chosen(site: Site) -> bool:
        return selector(site) or any(fnmatchcase(site.name, pattern) for pattern in exact)

    return _term("matching", patterns, chosen, lambda site: site.name)


def named(*names: str) -> Selector:
    """Selects sites by their exact names, as `sdc.sites` lists them."""
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'named{names}: expected at least one name, as in named("fwd/attn")')
    return _term("named", names, lambda site: site.name in names, lambda site: site.name)


def direction(*names: Direction) -> Selector:
    """Selects by direction: `direction("bwd", "remat")`; `sdc.program.selectors` explains the directions."""
    if not names or not set(names) <= set(DIRECTIONS):
        raise ValueError(f"direction{names}: expected one or more of {', '.join(DIRECTIONS)}")
    return _term("direction", names, lambda site: site.direction in names, lambda site: site.direction)


def iteration(*numbers: int, loop: int = -1) -> Selector:
    """Selects iterations of a loop: by default, of the innermost loop, which runs over the layers of a scanned model.

    Args:
        numbers: the numbers of the iterations, counted from 0.
        loop: number of the enclosing loop, where 0 is the outermost and -1 the innermost.
    """
    if not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"iteration{numbers}: expected one or more numbers of at least 0")

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
    return _term(
        "inside", [prefix], lambda site: site.scope.split("/")[: len(wanted)] == wanted, lambda site: site.scope
    )


def boundary(depth: int) -> Selector:
    """Selects values that leave their scope at this depth or a smaller one; bisection compares these values first.

    At depth 1, these are the values that pass from one outermost scope to another. An error inside a scope is visible
    outside the scope only through these values.
    """
    if depth < 1:
        raise ValueError(f"boundary({depth}): expected a depth of at least 1")
    return Selector(f"boundary({depth})", lambda site: site.leaves <= depth)


_WORDS = {term.text: term for term in (everything, probes, operations, arithmetic, products, collectives)}
_TERMS: tuple[Callable[..., Selector], ...] = (
    primitive, scope, probed, source, argument, result, matching, named, direction, iteration, inside, boundary,
)  # fmt: skip
_CALLS = {term.__name__: term for term in _TERMS}


def no_hits(selector: Selector, sites: Sequence[Site]) -> str:
    """Returns the error message, with near misses, for a selector that matches none of a step's sites."""
    hints = []
    for leaf in selector.leaves():
        count = sum(map(leaf, sites))
        near = [] if count else leaf.near(sites)
        alone = f"{leaf.text} alone matches {count:,}" if len(selector.leaves()) > 1 else ""
        like = f"near misses: {', '.join(near)}" if near else ""
        remedy = "name tensors with sdc.probe, or select operations" if leaf is probes and not count else ""
        hints += [hint for hint in (alone, like, remedy) if hint]
    common = ", ".join(f"{name} ×{count}" for name, count in Counter(site.primitive for site in sites).most_common(8))
    return (
        f"selector {selector.text} matches none of the step's {len(sites):,} sites"
        + "".join(f"; {hint}" for hint in hints)
        + f"; the step has {common or 'nothing that depends on its arguments'}"
    )
