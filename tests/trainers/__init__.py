"""Small trainings with the real packages on CPU ranks, a stub GPU, and stubs for what cannot be installed."""
