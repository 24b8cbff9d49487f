"""Add a searcher: Optuna's TPE by ask and tell, on the accuracies of a supernet.

pip install optuna
python examples/own_searcher.py --quick
greedynas search runs/photos --flops 5M --searcher tpe --plugin examples/own_searcher.py
"""

import argparse
import tempfile
from pathlib import Path

import greedynas

try:
    import optuna
except ModuleNotFoundError:
    raise SystemExit("this example needs Optuna, which is not installed: pip install optuna") from None


@greedynas.register_searcher("tpe")
def tpe(plan):
    """Propose paths by Optuna's TPE sampler and report their accuracies to it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=plan.seed))
    for _ in range(plan.generations):
        trials = [study.ask() for _ in range(plan.population)]
        ops = plan.task.space.num_ops  # the number of ops of each layer
        paths = [tuple(t.suggest_categorical(f"layer {i}", range(n)) for i, n in enumerate(ops)) for t in trials]
        found = yield paths
        accuracies = {entry.path: entry.accuracy for entry in found}
        for trial, path in zip(trials, paths, strict=True):
            if path in accuracies:
                study.tell(trial, accuracies[path])
            else:  # the path exceeds the budget
                study.tell(trial, state=optuna.trial.TrialState.FAIL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="A run with a trained supernet. By default, one is trained.")
    parser.add_argument("--quick", action="store_true", help="Train so little that it takes seconds.")
    options = parser.parse_args()
    if options.run is None:
        quick = {"data.val_images": 0.7, "train.max_epochs": 3, "train.batch_size": 16}
        changes = quick if options.quick else None
        run = greedynas.train("fashion", Path(tempfile.mkdtemp(prefix="greedynas-")) / "fashion", changes=changes)
    else:
        run = greedynas.open_run(options.run)

    net, data = greedynas.load_supernet(run), run.data()
    images, labels = data.val.eval_batch(range(500) if options.quick else None)

    def evaluate(paths):
        return greedynas.evaluate_paths(net, paths, images, labels).accuracies

    budget = greedynas.Budget(max_macs=1_200_000)
    size = {"population_size": 10, "generations": 4} if options.quick else {"population_size": 20, "generations": 10}
    for searcher in ("tpe", "random", "evolution"):
        result = greedynas.search(net.space, evaluate, budget, searcher=searcher, pool=run.pool, **size)
        best = result.best
        print(f"{searcher:10} {result}: {' '.join(greedynas.op_names(best.path, net.space))}")
        assert net.space.costs([best.path]).macs[0] <= budget.max_macs
        assert abs(evaluate([best.path])[0] - best.accuracy) < 1e-9


if __name__ == "__main__":
    main()
