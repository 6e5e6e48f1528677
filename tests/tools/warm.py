"""What the parent of all commands has imported, so that none of them has to; no device is started by it.

The last of them adds a configuration that compiles within seconds: `--config mini`.
"""

import importlib

for _name in ("sdc.analysis.report", "sdc.tools.output", "sdc.tools.parse", "sdc.tools.progress", "tests.train.runs"):
    importlib.import_module(_name)
