"""Storms: random trials that take too long for the suite. `make storms` runs all of them and counts the outcomes."""
