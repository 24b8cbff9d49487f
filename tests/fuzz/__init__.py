"""A corpus of malformed input for every parser that untrusted files can reach, and a fuzzer."""
