"""`python -m greedynas` is the same as `greedynas`."""

from greedynas.cli.main import main

main()
