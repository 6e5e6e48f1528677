"""What `sdc campaign` does, by functions: single simulated faults, and what becomes of training after each.

Usage: python campaign.py RUN, where RUN is a new folder.
"""

import sys

from sdc.analysis import conclude
from sdc.train import CampaignJob, run_campaign

job = CampaignJob(folder=sys.argv[1], injections=10, steps=3, follow=1, where="probes", faults=["bitflip", "nan"])
run_campaign(job, on_row=lambda row: print(row["injection"], row["site"], row["outcome"]))
found = conclude(job.folder)  # writes summary.json, report.html and report.md
print(found["groups"]["fault"], found["report"], sep="\n")
