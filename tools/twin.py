"""`sdc twin`: lock-step twins, compared bit for bit."""

from .checked import check_options, describe_run, faults, transform
from .errors import CommandError
from .options import TwinOptions
from .output import finish
from .programs import Programs
from .session import Plan, execute


def twin(options: TwinOptions) -> int:
    """Runs twins and returns the exit code."""
    if options.twins < 2:
        raise CommandError(f"--twins {options.twins}: expected two or more")
    last = options.twins - 1
    check_options(options, twin=last)
    plan = Plan(
        kind="twin",
        twins=options.twins,
        placement=options.placement,
        programs=lambda config, placement: Programs(
            config,
            placement,
            options.sync,
            options.compare,
            tuple(faults(options, layers=config.model.layers, twin=last)),
            transform(options),
        ),
        manifest=lambda layers: describe_run(options, layers, twin=last),
        sync=options.sync,
        compare=options.compare,
    )
    return finish(options, execute(options, plan))
