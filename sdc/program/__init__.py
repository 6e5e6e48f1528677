"""Training steps as programs that can be rewritten.

- `selectors`: the sites of a step, and selectors that choose among them; `identities`: probes and other marks.
- `interpreter`: rewrites a step by a rule, and returns the rule's reports; `reports`: the interface of rules.
- `arguments`: arguments and results of a step, including Flax NNX objects.
- `plan`, `regions`, `flop_counts`: the equations of a program that are sites, and the work of these equations.
- `numbering`: operations that compute what another one has computed already.
- `mesh`: mapped axes, and the devices for which a program is compiled.
- `control_flow`: conditionals, loops and cached traces for rules.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Sites of a step.
    from .selectors import Site as Site, Where as Where
    from .interpreter import sites as sites
    from .identities import probe as probe

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
        primitive as primitive,
        probed as probed,
        probes as probes,
        products as products,
        result as result,
        scope as scope,
        source as source,
    )

    # Operations that run more than once.
    from .numbering import Recomputations as Recomputations, recomputations as recomputations

    # Rules: the action of a transformation at a site.
    from .interpreter import rewrite as rewrite, substitute as substitute
    from .reports import Place as Place, Reports as Reports, Rule as Rule
    from .mesh import bound_axes as bound_axes, varying as varying

if TYPE_CHECKING:  # for the other packages of this project
    from .arguments import aside as aside, holds_objects as holds_objects, taking as taking, traced as traced
    from .control_flow import closable as closable, rarely as rarely
    from .mesh import (
        agreed as agreed,
        axis_size as axis_size,
        compiled_for as compiled_for,
        compiling_for as compiling_for,
        manual_in_part as manual_in_part,
    )
    from .arguments import functional as functional, is_array as is_array
    from .regions import Region as Region
    from .reports import Values as Values
    from .selectors import Tags as Tags
    from .control_flow import traced_once as traced_once

__getattr__, __dir__, __all__ = facade(__name__)
