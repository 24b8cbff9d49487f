"""`greedynas bench`: a comparison of several ways to run a supernet on this machine."""
