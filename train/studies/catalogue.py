"""The studies by their names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from sdc.settings import SettingError

from ._paft import PaftStudy
from ._shadow import ShadowStudy
from .dropcompute import DropComputeStudy
from .lossy import LossyStudy
from .measurements import Measured
from .protocol import Study, finish
from .workloads import Task

Found = TypeVar("Found", bound=Measured)

STUDIES: Mapping[str, type[Study[Any]]] = {
    kind.name: kind for kind in (PaftStudy, DropComputeStudy, LossyStudy, ShadowStudy)
}


@overload
def study(
    which: Study[Found], workloads: Sequence[Task], *, progress: Callable[[str], object] | None = None
) -> Found: ...


@overload
def study(
    which: str, workloads: Sequence[Task], *, progress: Callable[[str], object] | None = None, **settings: Any
) -> Any: ...


def study(
    which: str | Study[Any],
    workloads: Sequence[Task],
    *,
    progress: Callable[[str], object] | None = None,
    **settings: Any,
) -> Any:
    """Runs a study of a method of robust aggregation, on one device.

    Args:
        which: `paft`, `dropcompute`, `lossy` or `shadow`; or a study with settings of its own.
        workloads: what is trained, such as `convnet(read_images())`, `transformer(("python",))` or `linear()`.
        progress: told of each part that is done; `Study.count` says how many there are.
        settings: settings for a study given by its name, fields of its class, such as `steps` and `seed`.

    Returns:
        What was measured: `PaftMeasured`, `DropComputeMeasured`, `LossyMeasured` or `ShadowMeasured`.
        `sdc.analysis.studies.findings_of` makes tables, figures and claims of it.

    Raises:
        SettingError: there is no such study, or a setting makes no sense.

    Example:
        >>> from sdc.train.studies import linear, study
        >>> from sdc.train.studies._shadow import KINDS
        >>> found = study("shadow", [linear()], steps=12, seed=1, kinds=KINDS[:1])
        >>> found.trainings[0].runs[0].verdict
        'clean'
    """
    if isinstance(which, str):
        if which not in STUDIES:
            raise SettingError("study", which, f"expected one of {', '.join(STUDIES)}")
        which = STUDIES[which](**settings)
    return finish(which.run(workloads), progress)
