"""The command line: specs from flags, one call each, and what it prints."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .burnin_options import (
        BurninOptions as BurninOptions,
        LoadOptions as LoadOptions,
        VerdictOptions as VerdictOptions,
    )
    from .burnin_output import show_report as show_report
    from .conduct import (
        check_devices as check_devices,
        check_folder as check_folder,
        experiment as experiment,
        new_folder as new_folder,
        prepare_devices as prepare_devices,
        settings_of as settings_of,
        workload_of as workload_of,
    )
    from .doctor_options import DoctorOptions as DoctorOptions
    from .errors import (
        CommandError as CommandError,
        Exit as Exit,
        VERDICTS as VERDICTS,
        flag as flag,
        run_errors as run_errors,
        usage_errors as usage_errors,
    )
    from .estimate_options import EstimateOptions as EstimateOptions
    from .fleet_options import (
        FleetOptions as FleetOptions,
        ScheduleOptions as ScheduleOptions,
        SimulateOptions as SimulateOptions,
        SummarizeOptions as SummarizeOptions,
    )
    from .golden_options import (
        GoldenListOptions as GoldenListOptions,
        GoldenMergeOptions as GoldenMergeOptions,
        GoldenOptions as GoldenOptions,
        GoldenRecordOptions as GoldenRecordOptions,
        GoldenVerifyOptions as GoldenVerifyOptions,
    )
    from .golden_output import show_golden as show_golden
    from .options import (
        CampaignOptions as CampaignOptions,
        CheckpointOptions as CheckpointOptions,
        DiffOptions as DiffOptions,
        ReportOptions as ReportOptions,
        TraceOptions as TraceOptions,
        TrainOptions as TrainOptions,
        TwinOptions as TwinOptions,
    )
    from .output import Output as Output, show as show, show_profile as show_profile, write as write
    from .pair_options import PairOptions as PairOptions, PoolOptions as PoolOptions
    from .pairs import compare as compare, refuse_beside as refuse_beside, twins_of as twins_of
    from .progress import (
        BurninProgress as BurninProgress,
        CountProgress as CountProgress,
        InjectionProgress as InjectionProgress,
        StageProgress as StageProgress,
    )
    from .resolving import resolve as resolve
    from .runtime import (
        give_up as give_up,
        keep_standard_output as keep_standard_output,
        leave_at_once as leave_at_once,
        onward as onward,
    )
    from .study_options import (
        AbftOptions as AbftOptions,
        AggregationStudyOptions as AggregationStudyOptions,
        CalibrateOptions as CalibrateOptions,
        NodesStudyOptions as NodesStudyOptions,
        ProductsStudyOptions as ProductsStudyOptions,
        ScarStudyOptions as ScarStudyOptions,
        StudyOptions as StudyOptions,
    )

__getattr__, __dir__, __all__ = facade(__name__, public=False)
