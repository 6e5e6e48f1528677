"""Evidence from steps that run again: kept steps, in idle time, and steps with the checker of the TPU's compiler."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdc.bits import has_bits

from ..multihost import first_line
from ..program import compiled_for
from .evidence import Call, Detection, Layer, names_in, results_of, settled
from .state import device_digests, devices_of


class Replayed(NamedTuple):
    """Digests of the results of a kept step, and of its replay."""

    names: tuple[str, ...]
    first: list[Any]
    again: list[Any]
    shardings: tuple[Any, ...]


class Replay(Layer):
    """Keeps the inputs of a step, and runs it again in idle time (`Watch.idle`), with the executable of the step.

    The comparison is with the results with which the training went on. A copy of the step's inputs is kept until then.
    """

    name = "replay"
    sees = "a step of the training whose results differ from those of its replay, whatever computed them"
    blind = "faults that recur in the replay"
    share = 0.1
    computations = 2

    def __init__(self) -> None:
        super().__init__()
        self.replay: Callable[[Any], Any] | None = None
        self.kept: list[Any] | None = None
        self.digests: list[Any] | None = None

    @property
    def ready(self) -> bool:
        return self.digests is None

    def prepare(self, call: Call) -> None:
        self.coverage, self.about = 1.0, "results, in idle time"
        self.kept = self.digests = None
        if call.has_references:
            self.why_not = "the step changes references, whose contents it does not compare"

    def cost(self, call: Call) -> Any:
        arrays = [array for array in _copied(call.arrays) if _is_comparable(array)]
        return jax.block_until_ready(device_digests(arrays))

    def before(self, call: Call) -> Any:
        self.replay, self.kept = call.replay, settled(_copied(call.arrays))  # without the arrays of the call
        return None

    def after(self, out: Any, given: Any) -> Any:
        if self.kept is not None and self.digests is None:
            results = results_of(out, given)
            compared, every = _named(results), [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
            if not compared:
                self.kept, self.why_not = None, "the step has no result that could be compared"
                return None
            self.coverage = sum(x.size for _, x in compared) / max(sum(x.size for x in every), 1)
            self.about = f"{len(compared)} of {len(every)} results, in idle time"
            self.digests = device_digests([array for _, array in compared])
        return None

    def idle(self) -> Any:
        if self.replay is None or self.kept is None or self.digests is None:
            return None
        replay, arrays, first = self.replay, self.kept, self.digests
        self.replay = self.kept = self.digests = None
        names, again = zip(*_named(replay(arrays)), strict=True)
        return Replayed(names, first, device_digests(again), tuple(array.sharding for array in again))

    def judge(self, found: Replayed, step: int) -> list[Detection]:
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found.first, found.again, strict=True)]
        wrong = [number for number, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]
        if not wrong:
            return []
        places = [devices_of(found.shardings[number], np.argwhere((pairs[number][0] != pairs[number][1]).any(-1)))
                  for number in wrong]  # fmt: skip
        touched, everywhere = {one for each in places for one in each}, len(found.shardings[wrong[0]].device_set)
        on = tuple(sorted(touched)) if len(touched) < everywhere else ()  # a reduction carries an error to all devices
        more = f" and {len(wrong) - 1} more results differ" if len(wrong) > 1 else " differs"
        return [Detection(self.name, step, f"{found.names[wrong[0]]}{more} from the replay of the step", on)]


def _copied(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) if isinstance(array, jax.Array) else np.array(array) for array in arrays]


def _is_comparable(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and has_bits(leaf.dtype)


def _named(results: Any) -> list[tuple[str, Any]]:
    leaves, structure = jax.tree.flatten(results)
    return [(name, leaf) for name, leaf in zip(names_in(structure), leaves, strict=True) if _is_comparable(leaf)]


def checker_options(kind: str) -> dict[str, bool]:
    """Returns the compiler options of the SDC checker for a kind of TPU."""
    one_core = any(name in kind for name in ("v5e", "v5 lite", "v6e", "v6 lite"))  # on which instructions are repeated
    return {
        "xla_tpu_enable_sdc_checker": True,
        "xla_tpu_sdc_check_halt_on_detection": True,
        "xla_tpu_sdc_replicate_llo": one_core,
    }


class VendorChecker(Layer):
    """Runs the step with the SDC checker of the TPU's compiler, which repeats operations and raises an error."""

    name = "vendor"
    sees = "an operation whose repetition has other bits (`xla_tpu_enable_sdc_checker`)"
    blind = "faults that recur in the repetition, and defects of SparseCores that do"
    share = 0.2
    bounds = False

    def prepare(self, call: Call) -> None:
        if (platform := compiled_for().platform) != "tpu":
            self.why_not = f"XLA has no checker for {platform}, only for TPUs"
            return
        run = call.run
        self.run = jax.jit(lambda arrays: run(arrays), compiler_options=checker_options(jax.devices()[0].device_kind))
        self.about = "operations with their repetitions, by XLA"

    def before(self, call: Call) -> Any:
        try:
            jax.block_until_ready(self.run(call.arrays))
        except jax.errors.JaxRuntimeError as error:
            return first_line(error)
        return None

    def judge(self, found: str, step: int) -> list[Detection]:
        return [Detection(self.name, step, f"the checker of XLA raised: {found}")]
