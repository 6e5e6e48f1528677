"""Imports modules in the parent of all commands, so that no command has to; starts no device.

The last module adds a configuration that compiles within seconds: `--config mini`.
"""

import importlib

for _name in ("sdc.analysis.report", "sdc.tools.output", "sdc.tools.parse", "sdc.tools.progress", "tests.train.runs"):
    importlib.import_module(_name)
