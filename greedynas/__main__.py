"""`python -m greedynas` is the same as `greedynas`."""

from greedynas.cli import main

main()
