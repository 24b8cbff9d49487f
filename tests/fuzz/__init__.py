"""Malformed input, kept as files, for every parser that a stranger's file can reach."""
