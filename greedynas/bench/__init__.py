"""`greedynas bench`: every way to run a supernet, side by side on the present machine."""
