"""Checkpoints that are known to be what was saved, and of which parts can be used.

Everything works on anybody's tree of arrays, and on Orbax's own checkpointers and files.

- `blocks`: digests of arrays, block by block, taken where the arrays are
- `certificate`: what a checkpoint must restore to, and who vouches for it
- `certified`: Orbax's checkpointer with certificates, and what a folder of checkpoints holds
- `partitions`: how a state is cut into blocks; `scar`: a running checkpoint of those that moved most, with its `store`;
  `outlook`: which to save, and what losing some would cost
- `recovery`: lost or wrong blocks put back, and nothing else; `copies`: of each host's, a state together after a loss
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

    # A running checkpoint: the blocks that moved most, and parts of a state given back.
    from .outlook import choose as choose
    from .partitions import Partition as Partition, Piece as Piece, partition as partition
    from .scar import (
        RunningCheckpoint as RunningCheckpoint,
        squared_distance as squared_distance,
        total_variation as total_variation,
    )

    # What a loss would cost now, and how to save.
    from .outlook import Advice as Advice, Loss as Loss, Outlook as Outlook, Watch as Watch, advise as advise
    from .outlook import daly_interval as daly_interval

    # Lost blocks put back, and wrong ones put right alone.
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
