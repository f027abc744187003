"""Imported by DeepSpeed up to 0.14.0 on a CPU; the tests use Gloo."""
