"""What the tools cost on chips that are not here. `make targets-quick` runs these, in an environment of its own."""
