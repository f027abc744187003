"""What the import hook does for a module of upstream. Nothing here is imported before the first one."""
