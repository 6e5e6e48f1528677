"""What the parent of all commands has imported, so that none of them has to; no device is started by it."""

import importlib

for _name in ("sdc.analysis.report", "sdc.tools.output", "sdc.tools.parse", "sdc.tools.progress", "sdc.train._run"):
    importlib.import_module(_name)
