"""Studies of robust aggregation: `sdc study`."""
