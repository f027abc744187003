"""Fixes to DeepSpeed, one file a fix."""
