#!/bin/sh
# Compare searchers on the 20 recorded supernets and on NAS-Bench-Macro: records/searchers-cpu2-2026-11-18.
# A first, small run: 5 seeds on each supernet, 20 on the truth; two parts of the same machine ran beside other work.
set -e
greedynas study searchers benchmarks/records/macro-h200-2026-11-16 --searcher model --searcher evolution \
    --seeds 5 --evaluations 250 --jobs 1 --out searchers-supernets
greedynas study searchers macro --truth ../shared/data/nas-bench-macro_cifar10.json \
    --seeds 20 --evaluations 300 --jobs 1 --out searchers-macro
