"""Checkpoint formats: reading and writing files without torch. Uses only `errors` and `runtime` of the package."""
