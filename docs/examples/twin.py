"""What `sdc twin` does, by functions: twins in lock-step, one of them with simulated faults.

Usage: python twin.py RUN, where RUN is a new folder.
"""

import sys

from sdc.analysis import conclude
from sdc.train import Twins, run

job = Twins(folder=sys.argv[1], steps=2, faults=['bitflip(rate=1e-3, site="fwd/ffn")'], placement="vmap")
run(job)
found = conclude(job.folder)  # writes summary.json, report.html and report.md
print(found["verdict"], found["reason"], found["report"], sep="\n")
