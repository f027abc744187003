"""Whether the other hosts of a training still give signs of life, while it saves or loads: docs/lost_host.md."""
