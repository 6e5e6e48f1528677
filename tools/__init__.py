"""The command line: each command builds specs from flags, makes one call and prints the result."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .launch import (
        JobCommand as JobCommand,
        Joint as Joint,
        check_devices as check_devices,
        check_folder as check_folder,
        check_job as check_job,
        execute as execute,
        experiment as experiment,
        new_folder as new_folder,
        prepare_devices as prepare_devices,
        together as together,
    )
    from .output import (
        COLOURS as COLOURS,
        Output as Output,
        print_parts as print_parts,
        show as show,
        show_profile as show_profile,
        table as table,
        write_json as write_json,
    )
    from .parse import Only as Only, ResultCommand as ResultCommand, given as given, require as require
    from .progress import (
        BurninProgress as BurninProgress,
        CountProgress as CountProgress,
        InjectionProgress as InjectionProgress,
        Progress as Progress,
        StageProgress as StageProgress,
        waiting as waiting,
    )
    from .runtime import (
        CommandError as CommandError,
        flag as flag,
        gently as gently,
        give_up as give_up,
        keep_standard_output as keep_standard_output,
        leave_at_once as leave_at_once,
        onward as onward,
        run_errors as run_errors,
        usage_errors as usage_errors,
        write as write,
    )

__getattr__, __dir__, __all__ = facade(__name__, public=False)
