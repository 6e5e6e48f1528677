"""Results as scalars, for the metric writers that a training loop has."""

import logging
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ..guarding import GuardReport, Watch
from ..program import Reports

LOG = logging.getLogger("sdc.integrations")
CHECKED, OVERHEAD, SIMULATED = "sdc/checked", "sdc/overhead", "sdc/simulated"
FOUND = {
    "flagged": "sdc/flagged", "mismatched": "sdc/mismatched", "not repeated": "sdc/mismatched", "changed": SIMULATED
}  # fmt: skip


class ScalarWriter(Protocol):
    """A writer of metrics, such as those of clu."""

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes scalars of a step."""


def scalars_of(result: "Reports[Any] | GuardReport | Watch[..., Any] | Mapping[str, Any]") -> dict[str, float]:
    """Returns the totals of a result as scalars; waits for its arrays.

    Args:
        result: reports of `abft`, `lockstep`, `witness` or `inject`; a guard or its report; or a line of `steps.jsonl`,
            with its loss (of each twin), gradient norm, learning rate and time besides.

    Returns:
        `sdc/checked`: rows, elements, recomputations, or checks that compared something; `sdc/flagged` (checksums, and
        findings of a guard) or `sdc/mismatched` (twins and recomputations); `sdc/overhead` of a guard, as a share of
        the time of the steps; `sdc/simulated`, the elements that simulated faults changed. Digests have no scalars.

    Example:
        >>> import jax.numpy as jnp, sdc
        >>> from sdc.integrations import scalars_of
        >>> out, flags = sdc.abft(lambda x: x @ x.T)(jnp.ones((4, 4)))
        >>> scalars_of(flags)
        {'sdc/checked': 4.0, 'sdc/flagged': 0.0}
    """
    if isinstance(result, Watch):
        result = result.report()
    if isinstance(result, Mapping) and "step" in result and not isinstance(result, Reports):
        return _of_line(result)
    if isinstance(result, GuardReport):
        checks = sum(layer.runs for layer in result.layers if layer.coverage)
        return {
            CHECKED: float(checks), FOUND["flagged"]: float(len(result.findings)), OVERHEAD: float(result.overhead)
        }  # fmt: skip
    if not isinstance(result, Reports):
        raise TypeError(
            f"expected reports, or a guard, not {type(result).__name__}; give what sdc.abft, sdc.lockstep, "
            "sdc.witness, sdc.inject or sdc.guard returns"
        )
    totals: dict[str, float] = {} if result else {CHECKED: 0.0}
    for row in result.table().records():
        for place, (column, value) in enumerate(row.items()):
            name = FOUND.get(column) or (CHECKED if place == 1 and column != "elements struck" else None)
            if name is not None and isinstance(value, numbers.Real):
                totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def _of_line(line: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("loss", "gradient_norm", "learning_rate", "seconds"):
        given = line.get(name)
        values = [] if given is None else np.atleast_1d(np.asarray(given, float)).tolist()
        found |= {name if len(values) == 1 else f"{name}/{twin}": value for twin, value in enumerate(values)}
    compared = [*line.get("sites", {}).values(), *(line[part] for part in ("state", "gradient") if part in line)]
    if "abft" in line:
        found |= {CHECKED: float(line["abft"]["checked"]), FOUND["flagged"]: float(line["abft"]["flagged"])}
    if any("mismatched" in part for part in compared):
        found[CHECKED] = found.get(CHECKED, 0.0) + sum(part.get("checked", 0) for part in compared)
        found[FOUND["mismatched"]] = float(sum(part.get("mismatched", 0) for part in compared))
    if "findings" in line:
        found[FOUND["flagged"]] = found.get(FOUND["flagged"], 0.0) + len(line["findings"])
    if injected := sum(part.get("injected", 0) for part in compared):
        found[SIMULATED] = float(injected)
    return found


_FAILED: set[tuple[type, type]] = set()  # writers and their errors that the log has


def write_scalars(
    writer: "ScalarWriter | Callable[[int, Mapping[str, float]], Any]", step: int, result: Any
) -> dict[str, float]:
    """Writes the scalars of a result; errors of the writer are logged once for each kind, and training goes on.

    Args:
        writer: an object with `write_scalars(step, scalars)`, as clu's writers have it, or such a function: for
            Weights & Biases `lambda step, scalars: run.log(scalars, step=step)`, for TensorBoardX and metrax a loop
            over the scalars.
        step: number of the step.
        result: see `scalars_of`.

    Returns:
        The scalars.

    Example:
        >>> import jax.numpy as jnp, sdc
        >>> from sdc.integrations import write_scalars
        >>> out, flags = sdc.abft(lambda x: x @ x.T)(jnp.ones((4, 4)))
        >>> scalars = write_scalars(print, 7, flags)
        7 {'sdc/checked': 4.0, 'sdc/flagged': 0.0}
    """
    scalars = scalars_of(result)
    write = getattr(writer, "write_scalars", writer)
    if not callable(write):
        raise TypeError(f"{type(writer).__name__} is no writer; expected write_scalars(step, scalars), or a function")
    try:
        write(step, dict(scalars))
    except Exception as error:  # writers raise anything, and repeat it
        kind = type(writer), type(error)
        if kind not in _FAILED:
            _FAILED.add(kind)
            said = "".join(traceback.format_exception_only(error)).strip()
            LOG.warning("metrics were not written (%s); training goes on", said)
    return scalars
