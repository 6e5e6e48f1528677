"""The experiments of the studies. Experiments return measurements, and neither print nor end the process.

settings      specifications of the studies: each flag of `sdc study` is a field
workloads     models, data and training of the aggregation studies
parts         parts of a study on record, from which it resumes
measurements  results of the experiments
theory        formulas with which results are compared

For each paper, one module contains the experiment. Specifications, measurements and theory need no JAX.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Studies of robust aggregation.
    from .settings import Study as Study, finish as finish, study as study
    from .settings import PaftStudy as PaftStudy, DropComputeStudy as DropComputeStudy, LossyStudy as LossyStudy
    from .settings import Hardware as Hardware, ShadowStudy as ShadowStudy

    # Their workloads, and a trainer for custom studies.
    from .workloads import Task as Task, convnet as convnet, linear as linear, transformer as transformer
    from .workloads import Method as Method, Trained as Trained, Trainer as Trainer

    # Failures of iterative-convergent training algorithms.
    from .settings import ScarStudy as ScarStudy, Sources as Sources
    from ._scar import SUBJECTS as SUBJECTS, Subject as Subject, subjects as subjects
    from ._scar import finish_parts as finish_parts, record_study as record_study

    # Simulated nodes compared with the published ones.
    from .settings import NodesStudy as NodesStudy

    # Checked products on the reference workload.
    from .settings import Calibration as Calibration, ProductsStudy as ProductsStudy
    from .products import CalibrationError as CalibrationError

if TYPE_CHECKING:  # for the other packages of this project
    from .measurements import Compared as Compared, NodesMeasured as NodesMeasured
    from .measurements import DropComputeMeasured as DropComputeMeasured, LossyMeasured as LossyMeasured
    from .measurements import DroppedRun as DroppedRun, DroppedTraining as DroppedTraining
    from .measurements import LossyTraining as LossyTraining, NoisyTraining as NoisyTraining
    from .measurements import Measured as Measured, PaftMeasured as PaftMeasured, ProductsMeasured as ProductsMeasured
    from .measurements import ShadowMeasured as ShadowMeasured, Watched as Watched
    from .products import DISTRIBUTIONS as DISTRIBUTIONS
    from .products import errors_found as errors_found, flagged as flagged
    from .theory import divergence_over_time as divergence_over_time, expected_speedup as expected_speedup
    from .theory import pair_drift as pair_drift
    from ._nodes import find_node as find_node, scaled_faults as scaled_faults
    from .parts import RecordedParts as RecordedParts
    from .settings import check_measurement as check_measurement
    from .workloads import chosen_tasks as chosen_tasks

__getattr__, __dir__, __all__ = facade(__name__)
