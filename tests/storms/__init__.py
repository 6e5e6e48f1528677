"""Storms: what no test of seconds can show. `make storms` runs all of them and tells what came of each, in counts."""
