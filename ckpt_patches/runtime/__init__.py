"""What the tools run on: several hosts, as a launcher starts their ranks."""
