"""Test helpers shared by `tests.stages.test_run` and others."""


def content(folder):
    """Return the contents of all files except the lock and the log, which may grow."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in (".lock", "log.txt"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
