"""Pilots of greedy_vs_uniform on a GPU or CPU: greedy_vs_uniform_pilot.py PLAN.json OUT.jsonl JOBS SECONDS"""

import json
import math
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, "benchmarks")


def one(job):
    import numpy as np
    import torch
    from scipy import stats

    from greedynas.config import load_config
    from greedynas.data import open_data
    from greedynas.evaluation import evaluate_paths
    from greedynas.schedule import Schedule, corrected_images
    from greedynas.streams import stream, torch_stream
    from greedynas.supernet import Supernet
    from greedynas.training import train_supernet

    torch.set_num_threads(1)
    seed = job["seed"]
    dev = torch.device(job.get("device", "cuda"))

    def run(changes, corrected=None):
        config = load_config("fashion", {**changes, "seed": seed})
        data = open_data(
            config.data,
            image_size=config.space.image_size,
            image_channels=config.space.image_channels,
            seed=seed,
            device=dev,
        )
        s = config.train
        if corrected is not None:
            an = corrected_images(
                *Schedule(s.model_copy(update={"max_epochs": 1}), len(data.train)).predicted_images(
                    1, max(config.space.num_ops)
                )
            )
            s = s.model_copy(update={"max_epochs": math.ceil(corrected / an)})
        net = Supernet(config.space, generator=torch_stream(seed, "init")).to(dev, memory_format=torch.channels_last)
        t = time.perf_counter()
        p = "bf16" if dev.type == "cuda" else "fp32"
        st = train_supernet(net, data, s, seed=seed, precision=p, eval_precision=p)
        sec = time.perf_counter() - t
        paths = config.space.sample(300, stream(seed, "scored paths"))
        val, test = (
            evaluate_paths(net, paths, *im.eval_batch(), s.bn, bn_images=250, precision=p).accuracies
            for im in (data.val, data.test())
        )
        best = np.argsort(-val, kind="stable")[:20]
        truebest = np.argsort(-test, kind="stable")[:20]
        return {
            "epochs": st.epoch,
            "corrected": st.corrected_images,
            "seconds": sec,
            "val": float(val[best].mean()),
            "test": float(test[best].mean()),
            "all": float(test.mean()),
            "oracle": float(test[truebest].mean()),
            "sp": float(stats.spearmanr(val, test).statistic),
        }

    try:
        g = run({**job["set"], "train.sampler": "greedy"})
        u = run({**job["set"], "train.sampler": "uniform"}, g["corrected"])
        return {**job, "greedy": g, "uniform": u}
    except Exception:
        return {**job, "error": traceback.format_exc()[-800:]}


def main():
    import numpy as np

    plan, out, jobs, limit = (
        json.loads(Path(sys.argv[1]).read_text()),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        float(sys.argv[4]),
    )
    start = time.time()
    res = {}
    ex = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    todo = [
        {"name": v["name"], "set": v["set"], "seed": s, **({"device": v["device"]} if "device" in v else {})}
        for s in range(max(len(v["seeds"]) for v in plan))
        for v in plan
        if s < len(v["seeds"])
        for s in [v["seeds"][s]]
    ]
    fs = [ex.submit(one, j) for j in todo]
    try:
        for f in as_completed(fs, timeout=limit):
            r = f.result()
            with out.open("a") as o:
                o.write(json.dumps(r) + "\n")
            if "error" in r:
                print("ERROR", r["name"], r["error"][-400:], flush=True)
                continue
            res.setdefault(r["name"], []).append(r)
    except TimeoutError:
        print("out of time")
    ex.shutdown(wait=False, cancel_futures=True)
    for p in list(ex._processes.values() if ex._processes else []):
        p.kill()
    print(f"{time.time() - start:.0f} s")
    for v in plan:
        rs = res.get(v["name"], [])
        if not rs:
            continue
        d = np.array([r["greedy"]["test"] - r["uniform"]["test"] for r in rs])

        def m(w, k, rs=rs):
            return np.mean([r[w][k] for r in rs])

        print(
            f"{v['name']:40s} n={len(d)} diff {d.mean():+.4f} sd {d.std(ddof=1) if len(d) > 1 else 0:.4f} | greedy {m('greedy', 'test'):.4f} all {m('greedy', 'all'):.4f} ep {m('greedy', 'epochs'):.0f} {m('greedy', 'seconds'):.0f}s | uniform {m('uniform', 'test'):.4f} all {m('uniform', 'all'):.4f} ep {m('uniform', 'epochs'):.0f} {m('uniform', 'seconds'):.0f}s sp {m('greedy', 'sp'):.2f} {m('uniform', 'sp'):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
