"""Compare training of macro with and without replay on CIFAR-10, by the accuracies of 60 random paths.

python benchmarks/scripts/graphs_training.py FOLDER      (CIFAR-10 as class folders)
"""

import sys
import time

import numpy as np
import torch

from greedynas.data.datasets import open_data
from greedynas.gpu import engine
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.training import train_supernet
from greedynas.jobs.resolving import load_config
from greedynas.models.supernet import Supernet
from greedynas.runtime.rng import stream, torch_stream

torch.set_num_threads(1)
dev = torch.device("cuda")
d = None
for sampler, ep in [("uniform", 6), ("fair", 2)]:
    for mode, prec in [("auto", "bf16"), ("off", "bf16"), ("auto", "bf16 seed1")]:
        seed = 1 if "seed1" in prec else 0
        prec = prec.split()[0]
        c = load_config(
            "cifar10",
            {
                "train.sampler": sampler,
                "train.max_epochs": ep,
                "seed": seed,
                "data.source": sys.argv[1],
                "data.check_duplicates": False,
            },
        )
        d = d or open_data(c.data, image_size=32, image_channels=3, seed=0, device=dev)
        engine.use(mode)
        net = Supernet(c.space, generator=torch_stream(seed, "init")).to(dev, memory_format=torch.channels_last)
        t = time.time()
        st = train_supernet(net, d, c.train, seed=seed, precision=prec, eval_precision=prec)
        torch.cuda.synchronize()
        t = time.time() - t
        engine.use("off")
        p = c.space.sample(60, stream(0, "x"))
        im = d.val.eval_batch(np.arange(0, 5000, 5))
        off = evaluate_paths(net, p, *im, "batch", bn_images=500, precision="fp32").accuracies
        engine.use("auto")
        on = evaluate_paths(net, p, *im, "batch", bn_images=500, precision="bf16").accuracies
        print(
            sampler,
            ep,
            mode,
            seed,
            f"steps {st.step} mean {off.mean():.4f} best {off.max():.4f} | engine bf16 evaluation {on.mean():.4f} {on.max():.4f} largest difference {abs(on - off).max():.4f}; {t:.1f} s",
            flush=True,
        )
