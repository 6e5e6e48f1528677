"""Where the study's submodules are in the reference model."""

from sdc.program import Direction, Selector, direction, products, scope


def submodule_products(name: str) -> Selector:
    """The matrix products of a submodule, in the layers: what is recomputed belongs to the backward pass.

    Args:
        name: name of the study's submodule, one of `sdc.faults.SUBMODULES`.

    Example:
        >>> from sdc.train.submodules import submodule_products
        >>> submodule_products("bwd/ffn")
        products & direction("bwd", "remat") & scope("*/ffn/*", "*/ffn")
    """
    way, _, submodule = name.partition("/")
    passes: tuple[Direction, ...] = ("fwd",) if way == "fwd" else ("bwd", "remat")
    return products & direction(*passes) & scope(f"*/{submodule}/*", f"*/{submodule}")
