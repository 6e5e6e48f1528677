"""`sdc diff`: the first step and operation at which two traces part."""

from sdc.records import read_manifest

from .. import VERDICTS, DiffOptions, run_errors, show, usage_errors


def run(options: DiffOptions) -> int:
    """Compares two traces and returns the exit code."""
    with usage_errors():
        for folder in (options.run_a, options.run_b):  # what is no trace is told before JAX is imported
            read_manifest(folder, "trace")
    from sdc.analysis import describe_difference, write_difference
    from sdc.twins import diff, read_trace

    with usage_errors():
        a, b = read_trace(options.run_a), read_trace(options.run_b)
    with run_errors(options.run_a, resumable=False):
        found = diff(a, b)
        result = describe_difference(a, b, found)
        if options.output is not None:
            result["report"] = str(write_difference(options.output, a, b, found))
    show("diff", result, as_json=options.json)
    return int(VERDICTS[result["verdict"]])
