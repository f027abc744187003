"""Shared by the tools: ranks, worker processes, durable files, options, output."""
