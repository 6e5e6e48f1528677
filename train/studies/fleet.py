"""The simulated nodes of the study as hosts of a pair or a pool: in which step each is found, and what was expected."""

import dataclasses

import jax

from sdc.nodes import expected_frequency

from .. import FullLoad, TrainConfig, Workload, batches
from ..programs import place, place_batch

PARTS = ("state", "gradient")


@dataclasses.dataclass(frozen=True)
class NodeFound:
    """A simulated node in a pair or a pool.

    Attributes:
        node: its name, as it was given.
        steps: steps that were run: up to the first with a difference, or all.
        found: whether a difference was seen.
        first: the step in which it was, from 0.
        sites: submodules at which it was then; empty where only gradient or state tell of it.
        twins: hosts that differ from the reference; the node is the last one. Of three or more a majority names them.
        mismatched: elements that differ at submodules in that step.
        checked: elements of submodules compared in a step.
        expected: wrong elements that the model of the node predicts for the steps that were asked for.
    """

    node: str
    steps: int
    found: bool
    first: int | None
    sites: tuple[str, ...]
    twins: tuple[int, ...]
    mismatched: int
    checked: int
    expected: float


def find_node(node: str, steps: int, *, twins: int = 2, config: str | TrainConfig = "tiny", seed: int = 0) -> NodeFound:
    """Runs the first stage of a pair or a pool of which the last host is a simulated node, until it is found.

    All twins lie on one device. The program is compiled once for a node, which takes seconds, whatever the steps.

    Args:
        node: see `sdc.nodes.simulated_nodes.parse_suspect`; `node4,times=1e6` has a million times the rates.
        steps: optimizer steps at most.
        twins: hosts: 2 for a pair, more for a pool.
        config: what is trained.
        seed: of parameters, data order and faults.

    Raises:
        ValueError: there is no such node, or a number makes no sense.

    Example:
        >>> from sdc.train.studies.fleet import find_node
        >>> found = find_node("node11", 2)
        >>> found.found, found.first, found.twins, found.expected > 1000
        (True, 0, (1,), True)
    """
    workload = Workload(config=config, seed=seed)
    job = FullLoad(workload=workload, steps=steps, twins=twins, placement="vmap", suspect=node)
    chosen, dataset = job.load()
    placement = place(twins=twins, data=1, model=1, kind="vmap", devices=jax.devices()[:1])
    program = job.program(chosen, placement, donate=True)
    source = batches(dataset, batch_size=chosen.batch_size, microsteps=chosen.microsteps)
    state, each = program.init(seed), 0
    frequencies = expected_frequency(node, steps, sync="params")

    def end(number: int, found: bool, sites: tuple[str, ...], odd: tuple[int, ...], mismatched: int) -> NodeFound:
        # Twins beside the reference are compared with it: the node is one of them.
        own = each / (twins - 1) / max(len(checked), 1)
        expected = sum(frequency * own for frequency in frequencies.values()) * steps
        return NodeFound(node, number + 1, found, number if found else None, sites, odd, mismatched, each, expected)

    checked: list[str] = []
    for number in range(steps):
        state, out = program.step(state, place_batch(next(source), placement), number)
        state, seen = program.observe(state, out)
        row, details = program.rows(number, out, seen)
        checked = list(row["sites"])
        each = sum(site["checked"] for site in row["sites"].values())
        hits = {
            name: site["mismatched"] + site.get("unrepeated", 0)
            for name, site in row["sites"].items()
            if site["mismatched"] or site.get("unrepeated")
        }
        if hits or any(row[part]["mismatched"] for part in PARTS):
            ranks = [*(rank for line in details for rank in line["ranks"])]
            ranks += [rank for part in PARTS for rank in row[part].get("ranks", ())]
            odd = tuple(sorted({int(rank["twin"]) for rank in ranks}))
            return end(number, True, tuple(hits), odd, sum(hits.values()))
    return end(steps - 1, False, (), (), 0)
