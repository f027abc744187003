"""One number for each state of a parameter, which no division among ranks, files or formats changes."""
