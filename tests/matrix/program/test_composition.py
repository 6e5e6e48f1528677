"""An outer transformation sees exactly the sites of the plain step, whatever the inner ones compute."""

import itertools
from typing import Any

import pytest

import sdc
from sdc.program import arithmetic, everything, operations, products
from tests.matrix.program.test_any_step import FOREIGN
from tests.sdc.program.test_composition import TOOLS, Step, seen
from tests.sdc.program.test_interpreter import STEPS, X

ORDERS = [*itertools.product(("fingerprint", "inject", "strike"), repeat=2), ("abft", "inject"), ("inject", "abft")]


STEPS_HERE: dict[str, tuple[Step, tuple[Any, ...]]] = {
    **{name: (step, (X,)) for name, (step, _) in STEPS.items() if name != "nothing"},
    **{name: make() for name, make in FOREIGN.items()},
}


# `shard_map` takes values for equal on all devices there, and faults would make them differ.
TYPED = ("shard_map, checked", "partly manual", "nested shard_map")


@pytest.mark.parametrize("name", STEPS_HERE)
def test_sites_seen_through_two_transformations(name: str) -> None:
    step, args = STEPS_HERE[name]
    expected = seen(step, args)
    number = list(STEPS_HERE).index(name)
    where = [operations & arithmetic, everything][number % 2]
    has_products = any(map(products, sdc.sites(step, *args)))
    without = {*(["inject"] if name in TYPED else []), *([] if has_products else ["abft"])}
    orders = [order for order in ORDERS if not without & set(order)]
    for first, second in (orders[number % len(orders)], orders[(number + 4) % len(orders)]):
        assert seen(TOOLS[first](TOOLS[second](step, where), where), args) == expected, (first, second)
