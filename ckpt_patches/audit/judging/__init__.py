"""Judge what a reader found: scan the elements, find holes, name each kind of damage."""
