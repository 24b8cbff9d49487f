"""The process in which untrusted model files are opened and run."""
