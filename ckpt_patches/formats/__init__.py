"""What checkpoints look like on disk, and how bytes are read and written. Imports no torch, knows no other room."""
