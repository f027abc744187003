"""Fixes written into the files of a tree, and taken out again; stands on the engine and on durable writes."""
