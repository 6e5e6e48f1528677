"""Site: one place of a step, and the directions in which it can lie; tags, and sites that a tool could not work on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

if TYPE_CHECKING:
    import jax

Direction: TypeAlias = Literal["fwd", "bwd", "remat", "jvp", "arg", "out"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


PRODUCTS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul_wrapper", "scaled_matmul",
    "bcoo_dot_general", "bcsr_dot_general",
)  # fmt: skip


class Tags:
    """Names that this library leaves in programs, by which its tools recognize their own work."""

    HIDDEN = "sdc.hidden"  # scope of what a rule computes
    RARELY = "sdc.rarely"  # scope of what runs only if something is wrong, which an estimate leaves out
    KERNEL = "sdc_kernel"  # all kernels for TPUs, alike since the compiler writes the instructions of one name only
    PRODUCT = "sdc_product"  # kernels that compute a product; the value is the contracted axis of each factor


@dataclasses.dataclass(frozen=True)
class Site:
    """One place of a step.

    Attributes:
        name: the key of its report, unique in a step: `direction/probe`, `direction/scope/primitive` for an operation,
            `arg/path` and `out/path` for the step's own arrays; a second site of the same name ends in `#2`.
        primitive: name of the JAX primitive; `argument` or `result` for the step's own arrays.
        direction: the pass in which it lies; see `sdc.program.selectors`.
        probe: the name given to `probe`, or None.
        scope: the name stack (`jax.named_scope` and transformations), from the outermost call on.
        source: `file:line (function)` in the user's code, or an empty string.
        dims: names of the leading axes that control flow adds to a report, outermost first: a mesh axis, or `scan`.
        trips: how often each enclosing loop runs, outermost first; 0 for a `while`, of which nobody knows.
        mesh: names and sizes of the enclosing mesh axes.
        outputs: shapes and dtypes of the values, on one device and for one iteration.
        inputs: shapes and dtypes of the factors and whatever else goes into a product; empty for other operations.
        flops: floating-point operations of one evaluation on one device; see `flop_counts.flops`.
        products: those of the matrix products in it, of integers too; None where nobody knows, as in foreign code.
        order: its place in the program: numbers of the enclosing equations and its own, with `"scan"`, `"reversed"` or
            `"while"` where a loop is entered.
        leaves: number of scopes, from the outermost, that a reader of the value shares at the least, plus one: the
            depth at which the value leaves its scope.
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
    inputs: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(default=(), compare=False)  # traces do not keep them
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
        """Evaluations in a step, on all devices of its meshes; a `while` counts as if it ran once."""
        return math.prod(trips or 1 for trips in self.trips) * math.prod(size for _, size in self.mesh)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return self.primitive in PRODUCTS

    @property
    def path(self) -> str | None:
        """Path of the array in the step's arguments or results; None for other sites."""
        return self.name.partition("/")[2] if self.direction in ("arg", "out") else None

    def __str__(self) -> str:
        shapes = " ".join(f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in self.outputs)
        sizes = iter(trips for trips in self.trips if trips)
        names = (f"{name} {dict(self.mesh)[name] if name != 'scan' else next(sizes)}" for name in self.dims)
        axes = f" by {' × '.join(names)}" if self.dims else ""
        return f"{self.name}  {shapes}{axes}  {self.flops:,} FLOP  {self.source}".rstrip()


class Skipped(NamedTuple):
    """A site that a tool could not work on."""

    site: Site  # the site
    reason: str  # why
    # Of the step's floating-point operations, those of the products in it; None where that is not known
    share: float | None = None


Predicate: TypeAlias = Callable[[Site], bool]
Where: TypeAlias = Predicate | str
"""Which sites are meant, in every function that asks for some: a selector, its text, or any predicate of sites."""
