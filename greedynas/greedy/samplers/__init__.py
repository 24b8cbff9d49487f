"""Samplers: which paths the next updates of a supernet train. The paper's greedy one, and those it is compared with."""
