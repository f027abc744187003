"""Fixes for DeepSpeed, one per file."""
