"""What `sdc twin` does, by functions: twins in lock-step, one of them on the simulated node 11 of the study.

Usage: python twin.py RUN, where RUN is a new folder.
"""

import sys

from sdc.analysis import conclude
from sdc.train import Twins, run

job = Twins(folder=sys.argv[1], steps=2, suspect="node11", placement="vmap")
run(job)
found = conclude(job.folder)  # writes summary.json, report.html and report.md
print(found["verdict"], found["reason"], found["report"], sep="\n")
