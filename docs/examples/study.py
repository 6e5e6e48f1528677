"""What `sdc study` does, by functions: what lost packets do to training, on a model that learns within seconds.

Usage: python study.py RUN, where RUN is a new folder.
"""

import sys
from pathlib import Path

from sdc.analysis.studies import write_study
from sdc.train.studies import LossyStudy, linear, study

chosen = LossyStudy(steps=24, rates=(0.0, 0.3), packet_rates=(0.3,), burst_rates=(), mended_rates=(), walk_rates=(0.3,))
measured = study(chosen, [linear()], progress=print)
found = write_study(Path(sys.argv[1]), measured)  # writes the record, summary.json, report.html and report.md
for check in found["checks"]:
    print(check, found["report"])
