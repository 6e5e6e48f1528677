"""Tests of sdc.costs that need no compiler."""
