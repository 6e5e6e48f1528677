"""The commands, in modules that are imported when one of their commands is called."""
