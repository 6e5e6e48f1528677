"""What `sdc trace` and `sdc diff` do, by functions: a golden trace, and the first operation of a run that differs.

Usage: python trace.py RUN, where RUN is a new folder; it gets the traces `golden` and `struck`.
"""

import sys

from sdc.analysis import conclude, describe_difference
from sdc.train import Tracing, run
from sdc.twins import diff, read_trace

golden, struck = f"{sys.argv[1]}/golden", f"{sys.argv[1]}/struck"
fault = 'bitflip(bits=30, step=1, site="bwd/ffn", iteration=(1, 1), element=7)'
run(Tracing(folder=golden, steps=2, where="probes", simulate="none"))
run(Tracing(folder=struck, steps=2, where="probes", simulate=fault, against=golden))
a, b = (read_trace(conclude(folder)["run"]) for folder in (golden, struck))  # each has a summary.json and a report.html
print(describe_difference(a, b, diff(a, b)).reason)
