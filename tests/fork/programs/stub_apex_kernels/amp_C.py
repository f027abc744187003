"""As in a compiled apex, for programs that import it: kernels that cannot be called."""
