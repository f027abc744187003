"""Repair a copy of a damaged checkpoint."""
