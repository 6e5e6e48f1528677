"""Tests of sdc.targets that need no compiler."""
