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

if TYPE_CHECKING:  # for the other packages of this project
    from .arguments import (
        check_function as check_function,
        holds_objects as holds_objects,
        taking as taking,
        traced as traced,
    )
    from .axes import (
        agreed as agreed,
        axis_place as axis_place,
        axis_size as axis_size,
        manual_in_part as manual_in_part,
        typed_as as typed_as,
    )
    from .inlined import REMEDY as REMEDY, underived as underived
    from .interpreter import Substitution as Substitution
    from .marks import HIDDEN as HIDDEN, KERNEL as KERNEL, PRODUCT as PRODUCT
    from .objects import functional as functional, has_type as has_type, is_array as is_array
    from .once import traced_once as traced_once
    from .platforms import (
        compiled_for as compiled_for,
        compiling_for as compiling_for,
        device_kind as device_kind,
        is_whole as is_whole,
    )
    from .rarely import RARELY as RARELY
    from .regions import Region as Region
    from .reports import Report as Report, Values as Values
    from .selectors import PRODUCTS as PRODUCTS, check_hits as check_hits, is_selector as is_selector

__getattr__, __dir__, __all__ = facade(__name__)
