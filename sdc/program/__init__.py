"""A step as a program that can be rewritten: its sites, selectors that choose among them, and the interpreter."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Places of a step.
    from .site import (
        DIRECTIONS as DIRECTIONS,
        Direction as Direction,
        Predicate as Predicate,
        Site as Site,
        Where as Where,
    )
    from .interpreter import sites as sites
    from ._probe import probe as probe

    # Selectors, and their text form.
    from .selectors import (
        Selector as Selector,
        argument as argument,
        arithmetic as arithmetic,
        as_selector as as_selector,
        boundary as boundary,
        collectives as collectives,
        direction as direction,
        everything as everything,
        inside as inside,
        iteration as iteration,
        matching as matching,
        named as named,
        operations as operations,
        parse_selector as parse_selector,
        primitive as primitive,
        probed as probed,
        probes as probes,
        products as products,
        result as result,
        scope as scope,
        source as source,
    )

    # Rules: what a transformation does at a site.
    from .interpreter import required as required, rewrite as rewrite, substitute as substitute
    from .reports import Place as Place, Reports as Reports, Rule as Rule
    from .axes import bound_axes as bound_axes, varying as varying

__getattr__, __dir__, __all__ = facade(__name__)
