"""Provide the command line, with one file for each family of verbs."""
