"""Models that are open in their runtimes. Nothing here needs PyTorch, except for ExecuTorch, whose runtime does.

These modules run in the process that opens untrusted files (`sandbox/`), and in the export.
"""
