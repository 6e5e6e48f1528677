"""`sdc abft`: what checksummed products find, and what they need to know of a device."""
