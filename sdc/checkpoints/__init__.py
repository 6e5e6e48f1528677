"""Checkpoints that are known to be what was saved, and of which parts can be used.

Everything works on anybody's tree of arrays, and on Orbax's own checkpointers and files.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Certificates.
    from .auditing import (
        Audit as Audit,
        audit as audit,
        certify_folder as certify_folder,
        checkpoints_in as checkpoints_in,
    )
    from ._certify import Certified as Certified, certify as certify
    from .certificate import CertificateError as CertificateError, Status as Status
    from .verifying import Damaged as Damaged, Wrong as Wrong

    # A running checkpoint: the blocks that moved most, and parts of a state given back.
    from .choosing import choose as choose
    from .norms import squared_distance as squared_distance, total_variation as total_variation
    from ._partition import Partition as Partition, Piece as Piece, partition as partition
    from .recovery import Reader as Reader, Recovered as Recovered
    from .scar import RunningCheckpoint as RunningCheckpoint
    from .store import StoreError as StoreError

    # What a loss would cost now, and how to save.
    from .outlook import Advice as Advice, Loss as Loss, Outlook as Outlook, Watch as Watch, advise as advise
    from .outlook import daly_interval as daly_interval

    # Blocks that are wrong, put right alone.
    from ._repair import (
        FromCheckpoint as FromCheckpoint,
        FromRunning as FromRunning,
        FromState as FromState,
        Repair as Repair,
        Repaired as Repaired,
        differing as differing,
        repair as repair,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .blocks import bits_of as bits_of, take as take
    from .boxes import (
        Box as Box,
        box_of as box_of,
        box_text as box_text,
        overlap as overlap,
        parse_box as parse_box,
        volume as volume,
        within as within,
    )
    from .choosing import POLICIES as POLICIES
    from .copies import Copies as Copies
    from .norms import Distance as Distance
    from .perturbations import (
        Convergence as Convergence,
        error_floor as error_floor,
        fit_convergence as fit_convergence,
        iteration_cost_bound as iteration_cost_bound,
        iterations_bound as iterations_bound,
    )
    from .store import last_save as last_save
    from .survivors import agree as agree, gather as gather
    from .timings import Timings as Timings

__getattr__, __dir__, __all__ = facade(__name__)
