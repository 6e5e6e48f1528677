"""Programs define what a run computes and records at each step.

- `config`: the configuration of a training run, and presets.
- `model`: the decoder and its collectives. `step`: the decoder's optimizer step on one device, sharded by ZeRO-1.
- `replicas`: the step in which each data rank has its own parameters, for the methods of `sdc.aggregation`.
- `placement`: the layout of twins and ranks over devices.
- `device`: the base class of programs, and the step of one device. `instrumented`: the programs for one copy, traces
  and twins. `guarded`: the program of one copy, watched by a guard.
- `tallies`: the conversion of reports to lines of the record.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # The interface of programs.
    from .device import Program as Program, StepRows as StepRows

    # The computation of one device: parameters sharded over all ranks, or a copy per data rank.
    from .device import DeviceStep as DeviceStep, Transform as Transform, sharded as sharded
    from .replicas import make_replicas as make_replicas, replicated as replicated

    # One copy; a trace; twins; workers with real clocks.
    from .instrumented import SingleProgram as SingleProgram, TraceProgram as TraceProgram, TwinProgram as TwinProgram
    from .guarded import GuardedProgram as GuardedProgram
    from .replicas import ClockedProgram as ClockedProgram

if TYPE_CHECKING:  # for the other packages of this project
    from .config import (
        DType as DType,
        Remat as Remat,
        ModelConfig as ModelConfig,
        OptimizerConfig as OptimizerConfig,
        TrainConfig as TrainConfig,
        check as check,
        get_config as get_config,
    )
    from .device import (
        described as described,
        described_batch as described_batch,
        initial_state as initial_state,
        place_batch as place_batch,
        plain as plain,
    )
    from .model import (
        DATA as DATA,
        MODEL as MODEL,
        cross_entropy as cross_entropy,
        init_params as init_params,
        logits as logits,
    )
    from .placement import Placement as Placement, TWIN as TWIN, place as place
    from .step import (
        BATCH_SPEC as BATCH_SPEC,
        TrainState as TrainState,
        abstract_state as abstract_state,
        device_step as device_step,
        history_ratio as history_ratio,
        init_state as init_state,
    )
    from .guarded import after_end as after_end
    from .instrumented import OperationsProgram as OperationsProgram

__getattr__, __dir__, __all__ = facade(__name__)
