"""The fixtures of tests of burn-ins."""

from tests.sdc.burnin import conftest

devices, programs, every, few = conftest.devices, conftest.programs, conftest.every, conftest.few
