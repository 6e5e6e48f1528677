"""Commands: flags to objects, call, show. A module each, loaded when its command is called."""
