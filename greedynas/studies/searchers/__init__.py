"""`greedynas study searchers`: how many evaluations searchers need, on tables whose values are known."""
