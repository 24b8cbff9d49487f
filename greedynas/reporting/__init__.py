"""The report of a run: facts read from its files, charts, tables and the words around them."""
