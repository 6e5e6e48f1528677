"""The fixture of tests of checkpoints."""

from tests.sdc.checkpoints import conftest

running = conftest.running
