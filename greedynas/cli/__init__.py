"""The command line, one file for each family of verbs."""
