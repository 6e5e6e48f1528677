"""What `sdc train --abft` does, by functions: training that checks its own products, and corrects the wrong ones.

Usage: python train_abft.py RUN, where RUN is a new folder.
"""

import sys

from sdc.analysis import conclude
from sdc.train import Checks, Training, run

where = 'products & scope("*/ffn")'  # forward, in the feed-forward blocks; "products" for all
fault = f"bitflip(bits=30, rate=1e-5, where={where})"
job = Training(folder=sys.argv[1], steps=2, faults=[fault], checks=Checks(mode="correct", where=where))
run(job)
found = conclude(job.folder)  # writes summary.json, report.html and report.md
print(found["verdict"], found["reason"], found["abft"], found["report"], sep="\n")
