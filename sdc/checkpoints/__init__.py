"""Checkpoints that are verified to restore the saved bits, and recovery of parts of a state.

All functions accept any tree of arrays; certificates work with Orbax's own checkpointers and files.

- `blocks`: digests of arrays, block by block, computed on the arrays' devices
- `certificate`: the expected content of a checkpoint, and the evidence for it
- `certified`: Orbax's checkpointer with certificates, and audits of folders of checkpoints
- `partitions`: division of a state into blocks
- `scar`: a running checkpoint, which saves the blocks that moved most
- `store`: the files of a running checkpoint
- `outlook`: selection of blocks, and the cost of losing blocks
- `recovery`: restoration of only the lost or wrong blocks
- `copies`: copies on each host, from which a state is assembled after a loss
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Certificates.
    from .certificate import (
        CertificateError as CertificateError,
        Damaged as Damaged,
        StoreError as StoreError,
        Wrong as Wrong,
    )
    from .certified import Certified as Certified, certify as certify
    from .certified import (
        Audit as Audit,
        audit as audit,
        certify_folder as certify_folder,
        checkpoints_in as checkpoints_in,
    )
    from .certificate import Status as Status

    # A running checkpoint of the blocks that moved most, and recovery of parts of a state.
    from .outlook import choose as choose
    from .partitions import Partition as Partition, Piece as Piece, partition as partition
    from .scar import (
        RunningCheckpoint as RunningCheckpoint,
        squared_distance as squared_distance,
        total_variation as total_variation,
    )

    # The current cost of a loss, and advice on saving.
    from .outlook import Advice as Advice, Loss as Loss, Outlook as Outlook, Watch as Watch, advise as advise
    from .outlook import daly_interval as daly_interval

    # Recovery of lost blocks, and repair of wrong ones.
    from .recovery import (
        FromCheckpoint as FromCheckpoint,
        FromRunning as FromRunning,
        FromState as FromState,
        Reader as Reader,
        Recovered as Recovered,
        Repair as Repair,
        Repaired as Repaired,
        differing as differing,
        repair as repair,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .blocks import bits_of as bits_of, take as take
    from .certificate import OtherState as OtherState, certified_steps as certified_steps
    from .copies import Copies as Copies, agree as agree, gather as gather
    from .outlook import POLICIES as POLICIES, Policy as Policy
    from .outlook import (
        Convergence as Convergence,
        error_floor as error_floor,
        fit_convergence as fit_convergence,
        iteration_cost_bound as iteration_cost_bound,
        iterations_bound as iterations_bound,
    )
    from .scar import Distance as Distance
    from .store import last_save as last_save

__getattr__, __dir__, __all__ = facade(__name__)
