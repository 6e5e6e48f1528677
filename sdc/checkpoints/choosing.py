"""Which blocks a running checkpoint saves next: those that moved most, or the next ones, or any.

Qiao et al. (ICML 2019, section 4.3): instead of everything every C iterations, the fraction r that moved most since it
was last saved, every r C iterations: as many bytes, and a smaller perturbation if something is lost.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

Policy: TypeAlias = Literal["priority", "round-robin", "random"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def choose(
    policy: Policy, budget: float, sizes: Sequence[int], moved: np.ndarray, *, cursor: int = 0, seed: int = 0
) -> tuple[list[int], int]:
    """Chooses blocks of at most so many bytes; one block at least, unless there are none to spend.

    Args:
        policy: `priority`: largest `moved` for each byte first; `round-robin`: on from the cursor; `random`: any.
        budget: bytes that may be written.
        sizes: bytes of the blocks.
        moved: how far each moved; of those that never were saved or could not be, infinity, and they come first.
        cursor: block at which `round-robin` goes on.
        seed: of `random`.

    Returns:
        Numbers of the blocks, and the next cursor.

    Example:
        >>> import numpy as np
        >>> from sdc.checkpoints.choosing import choose
        >>> choose("priority", 16, [8, 8, 8, 8], np.asarray([1.0, 9.0, 0.0, 4.0]))
        ([1, 3], 0)
    """
    count, wide = len(sizes), np.asarray(sizes, float)
    # What is not a number moved, and by no known amount.
    urgency = np.where(np.isnan(moved), np.inf, moved) / np.maximum(wide, 1)
    if policy == "round-robin":
        order = [(cursor + number) % count for number in range(count)]
    elif policy == "random":
        order = np.random.default_rng(seed).permutation(count).tolist()
    else:
        order = np.argsort(-urgency, kind="stable").tolist()
    if policy != "priority":
        order.sort(key=lambda number: not np.isinf(urgency[number]))
    held, chosen = 0.0, list[int]()
    for number in order:
        held += wide[number]
        if budget <= 0 or (chosen and held > budget):
            break
        chosen.append(number)
    return chosen, (chosen[-1] + 1) % count if chosen and policy == "round-robin" else cursor
