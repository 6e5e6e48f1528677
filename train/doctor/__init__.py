"""Is this environment fit for bitwise comparison? The same operations again, in other processes, caches and orders.

Everything is measured in child processes (`child`, asked by `children`), so that each has an environment of its own.
`examine` puts the questions, `narrowing` finds the setting that makes the difference, `layout` has what comes of it.
"""
