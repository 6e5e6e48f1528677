"""The experiments of the studies: they return what was measured, and neither print nor end the process.

`measurements` has what they return and `theory` what they compare it with; these two need no JAX.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Studies of robust aggregation.
    from .catalogue import STUDIES as STUDIES, study as study
    from .protocol import Study as Study, finish as finish
    from ._paft import PaftStudy as PaftStudy
    from .dropcompute import DropComputeStudy as DropComputeStudy
    from .lossy import LossyStudy as LossyStudy
    from ._shadow import Hardware as Hardware, ShadowStudy as ShadowStudy

    # What they train, and a trainer for studies of one's own.
    from .workloads import (
        Task as Task,
        convnet as convnet,
        linear as linear,
        transformer as transformer,
    )
    from .workloads import Method as Method, Trained as Trained, Trainer as Trainer

    # Failures of trainings that recover by themselves.
    from ._scar import ScarStudy as ScarStudy
    from ._scar import finish_parts as finish_parts, record_study as record_study
    from .scar_workloads import SUBJECTS as SUBJECTS, Subject as Subject, subjects as subjects
    from .settings import Sources as Sources

    # The simulated nodes beside the published ones.
    from ._nodes import NodesStudy as NodesStudy

    # Checked products on the reference workload.
    from .products import ProductsStudy as ProductsStudy
    from .products import Calibration as Calibration, CalibrationError as CalibrationError

if TYPE_CHECKING:  # for the other packages of this project
    from .measurements import (
        Compared as Compared,
        DropComputeMeasured as DropComputeMeasured,
        DroppedRun as DroppedRun,
        DroppedTraining as DroppedTraining,
        LossyMeasured as LossyMeasured,
        LossyTraining as LossyTraining,
        Measured as Measured,
        NodesMeasured as NodesMeasured,
        NoisyTraining as NoisyTraining,
        PaftMeasured as PaftMeasured,
        ProductsMeasured as ProductsMeasured,
        ShadowMeasured as ShadowMeasured,
        Watched as Watched,
        WatchedTraining as WatchedTraining,
    )
    from .products import (
        DISTRIBUTIONS as DISTRIBUTIONS,
        Found as Found,
        errors_found as errors_found,
        flagged as flagged,
    )
    from .theory import (
        divergence_over_time as divergence_over_time,
        expected_speedup as expected_speedup,
        pair_drift as pair_drift,
    )
    from ._nodes import find_node as find_node
    from .settings import (
        LEAST as LEAST,
        CalibrationSettings as CalibrationSettings,
        NodesSettings as NodesSettings,
        ProductsSettings as ProductsSettings,
        ScarSettings as ScarSettings,
        check_measurement as check_measurement,
        check_training as check_training,
    )
    from .workloads import chosen_tasks as chosen_tasks

__getattr__, __dir__, __all__ = facade(__name__)
