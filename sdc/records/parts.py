"""Lines of a study that is made of parts: what each found."""

from typing import Annotated, Any

from .fields import Fields, about
from .rows import LAST


class PartRow(Fields, kw_only=True):
    """A line of `parts.jsonl`: a part of a study that is done."""

    part: Annotated[int, about("number of the part, from 0", ge=0, le=LAST)]
    what: Annotated[str, about("which experiment")]
    workload: Annotated[str, about("what it trains; empty where it trains nothing of the workloads")]
    start: Annotated[int | None, about("which of the first states; `null` where it is of all")] = None
    seconds: Annotated[float | None, about("wall time of the part")] = None
    found: Annotated[dict[str, Any], about("what was found; `failed` says why nothing was")]
