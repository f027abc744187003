"""Fixes of another distribution: docs/plugins.md."""
