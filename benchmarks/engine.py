"""The GPU engine against plain PyTorch (bf16 autocast, channels_last) on the present GPU: correctness first, then speed.

    python benchmarks/engine.py --out DIR            # everything, about three minutes on an H200
    python benchmarks/engine.py check micro --out DIR

Parts: warm (compile what the spaces need), check (blocks in bf16 against float64), micro (kernel by kernel, with the
share of the measured copy bandwidth), step (training and evaluation of random paths), profile, compiled.
"""

import argparse
import json
import statistics
import time
import traceback
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from greedynas import engine
from greedynas.blocks import MBConv, initialise
from greedynas.evaluation import bn_mode
from greedynas.space import load_space
from greedynas.supernet import Supernet

DEVICE = torch.device("cuda")
RESULTS: dict = {}


def milliseconds(work, repeats=20, warm=3):
    """Median time on the device."""
    for _ in range(warm):
        work()
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def copy_bandwidth():
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3


def error(value, reference):
    return ((value.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def randomise(block):
    initialise(block)
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
            nn.init.normal_(module.running_mean, std=0.1)
    return block.to(DEVICE, memory_format=torch.channels_last)


def run_block(block, x, g, mode, precision):
    x = x.to(torch.float64 if precision == "float64" else torch.bfloat16).clone(memory_format=torch.preserve_format)
    x.requires_grad_()
    with engine.using(mode), torch.autocast("cuda", torch.bfloat16, enabled=precision != "float64"):
        y = block(x)
    y.backward(g.to(y.dtype))
    tensors = {"y": y.detach(), "dx": x.grad}
    tensors |= {name: p.grad for name, p in block.named_parameters()}
    tensors |= {name: b.clone() for name, b in block.named_buffers() if "running" in name}
    return tensors


def check():
    """Errors against float64 of the engine and of plain PyTorch in bf16: the engine's may not be larger than 1.5 times."""
    cases = []
    for se, act in ((False, "relu"), (True, "hard_swish")):
        for kernel in (3, 5, 7):
            for stride in (1, 2):
                cases.append((24, 24 if stride == 1 else 40, stride, 6, kernel, se, act, 3, 15))
    cases += [(32, 16, 1, 1, 3, False, "relu", 4, 28), (10, 10, 1, 3, 3, False, "relu", 5, 9), (96, 96, 1, 6, 5, True, "hard_swish", 8, 14),
              (192, 320, 1, 6, 7, False, "relu", 16, 7), (16, 32, 2, 6, 3, False, "relu", 4, 56), (40, 40, 1, 3, 7, False, "relu", 4, 28)]  # fmt: skip
    worst = 0.0
    for case in cases:
        *shape, images, size = case
        torch.manual_seed(0)
        block = randomise(MBConv(*shape))
        x = torch.randn(images, shape[0], size, size, device=DEVICE).bfloat16().to(memory_format=torch.channels_last)
        with torch.no_grad(), engine.using("off"):
            g = torch.randn_like(deepcopy(block)(x.float()))
        wanted = run_block(deepcopy(block).double(), x, g, "off", "float64")
        plain = run_block(deepcopy(block), x, g, "off", "bf16")
        ours = run_block(deepcopy(block), x, g, "on", "bf16")
        ratios = {k: error(ours[k], wanted[k]) / (1.5 * error(plain[k], wanted[k]) + 1e-3) for k in wanted}
        name = max(ratios, key=ratios.get)
        worst = max(worst, ratios[name])
        verdict = "ok " if ratios[name] <= 1 else "BAD"
        print(f"{verdict} {case}: worst {name}: {error(ours[name], wanted[name]):.1e}, plain {error(plain[name], wanted[name]):.1e}; y {error(ours['y'], wanted['y']):.1e}")  # fmt: skip
        RESULTS.setdefault("check", []).append({"case": str(case), "worst": name, "ratio": ratios[name]})
    print(f"check: {'all within bounds' if worst <= 1 else 'NOT within bounds'}")


MICRO = [  # in, out, stride, size, expansion, kernel
    (16, 32, 2, 112, 6, 5), (32, 32, 1, 56, 6, 3), (32, 32, 1, 56, 6, 5), (32, 32, 1, 56, 6, 7), (32, 32, 1, 56, 3, 5), (40, 40, 1, 28, 6, 5),
    (80, 80, 1, 14, 6, 5), (96, 96, 1, 14, 3, 7), (192, 192, 1, 7, 6, 5),
]  # fmt: skip


KERNELS = ("expand", "depthwise", "project", "normalise", "sums", "wgrad2", "dgrad2", "depthwise'", "wgrad1", "dgrad1")


def kernels_of(i, o, s, size, e, k, batch):
    """The kernels of a block in their order: bytes of the tensors that one has to move, and the call."""
    from greedynas import depthwise, depthwise_backward, kernels, pointwise

    block = randomise(MBConv(i, o, s, e, k, False, "relu"))
    x = torch.randn(batch, size, size, i, device=DEVICE).bfloat16()
    rows = x.view(-1, i)
    w1, w2 = engine._matrix(block.expand.conv, x), engine._matrix(block.project.conv, x)
    wd = block.depthwise.conv.weight.detach()
    a, part = pointwise.forward(rows, w1)
    v1 = kernels.finish_norm(block.expand.norm, part)
    a4 = a.view(*x.shape[:3], -1)
    b4, part = depthwise.forward(a4, wd, s, v1, "relu")
    b = b4.view(-1, b4.shape[-1])
    v2 = kernels.finish_norm(block.depthwise.norm, part)
    d, part = pointwise.forward(b, w2, v2, "relu")
    v3 = kernels.finish_norm(block.project.norm, part)
    g = torch.randn_like(d)
    coef3, _, _ = kernels.finish_gradient(v3, kernels.gradient_sums(g, d, v3), len(d), True)
    gb, part = pointwise.input_gradient(g, d, coef3, w2, x=b, before=v2, act="relu")
    coef2, _, _ = kernels.finish_gradient(v2, part, len(b), True)
    gb4 = gb.view_as(b4)
    ga, part, _ = depthwise_backward.backward(gb4, b4, coef2, a4, wd, s, v1, "relu")
    coef1, _, _ = kernels.finish_gradient(v1, part, len(a), True)
    ga = ga.view_as(a)
    X, A, B, D = x.nbytes, a.nbytes, b.nbytes, d.nbytes
    residual = rows if i == o and s == 1 else None
    calls = (
        (X + A, lambda: pointwise.forward(rows, w1)),
        (A + B, lambda: depthwise.forward(a4, wd, s, v1, "relu")),
        (B + D, lambda: pointwise.forward(b, w2, v2, "relu")),
        (2 * D + X * (residual is not None), lambda: kernels.normalise(d, v3, residual)),
        (2 * D, lambda: kernels.gradient_sums(g, d, v3)),
        (B + 2 * D, lambda: pointwise.weight_gradient(g, d, coef3, b, v2, "relu")),
        (2 * B + 2 * D, lambda: pointwise.input_gradient(g, d, coef3, w2, x=b, before=v2, act="relu")),
        (2 * B + 2 * A, lambda: depthwise_backward.backward(gb4, b4, coef2, a4, wd, s, v1, "relu")),
        (2 * A + X, lambda: pointwise.weight_gradient(ga, a, coef1, rows)),
        (2 * A + 2 * X, lambda: pointwise.input_gradient(ga, a, coef1, w1, add=rows)),
    )
    return dict(zip(KERNELS, calls, strict=True))


def micro(batch, bandwidth):
    """Each kernel of a block in microseconds, with the share of the time that its tensors would take to be copied."""
    print(f"{'block':>26} " + " ".join(f"{name:>15}" for name in (*KERNELS, "total")))
    for shape in MICRO:
        line, total, floors = [], 0.0, 0.0
        for name, (moved, work) in kernels_of(*shape, batch).items():
            # Many in a row, so that a short kernel does not wait for the next launch.
            ms = milliseconds(lambda work=work: [work() for _ in range(20)], repeats=3, warm=1) / 20
            floor = moved / bandwidth * 1e3
            total, floors = total + ms, floors + floor
            line.append(f"{ms * 1e3:7.0f} ({floor / ms:4.0%})")
            RESULTS.setdefault("micro", []).append(
                {"block": shape, "kernel": name, "us": ms * 1e3, "share": floor / ms}
            )
        line.append(f"{total * 1e3:7.0f} ({floors / total:4.0%})")
        i, o, s, size, e, k = shape
        print(f"{f'{i}-{o} /{s} {size}px MB{e}_K{k}':>26} " + " ".join(f"{text:>15}" for text in line), flush=True)


class Trainer:
    """Steps of a supernet on random images, with the engine or without."""

    def __init__(self, name, batch):
        self.space = load_space(name)
        self.net = Supernet(self.space, generator=torch.Generator().manual_seed(0)).to(DEVICE, memory_format=torch.channels_last)  # fmt: skip
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01, 0.9, nesterov=True)
        size = self.space.image_size
        self.images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
        self.labels = torch.randint(self.space.num_classes, (batch,), device=DEVICE)
        self.paths = self.space.sample(200, np.random.default_rng(0)).tolist()

    def train(self, path):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.net(self.images, path)
        loss = F.cross_entropy(logits.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, path):
        with torch.autocast("cuda", torch.bfloat16):
            return self.net(self.images, path)


def timed(work, *arguments):
    """Milliseconds until it is done, and until it is queued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work(*arguments)
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), 1e3 * queued


def engine_steps(trainer, paths):
    """Each path twice: the first time it is new."""
    told = {}
    with engine.using("auto"):
        for path in trainer.paths[-3:]:
            trainer.train(path)
        pairs = [(timed(trainer.train, path)[0], *timed(trainer.train, path)) for path in paths]
        first, second, queued = (list(column) for column in zip(*pairs, strict=True))
        stalls = np.subtract(first, second)
        told |= {"train_ms": second, "train_new_path_ms": first, "queued_ms": statistics.median(queued)}
        told |= {"first_minus_second_p95_ms": float(np.percentile(stalls, 95)), "first_minus_second_max_ms": float(stalls.max())}  # fmt: skip
        with bn_mode(trainer.net, "batch"):
            trainer.evaluate(trainer.paths[-1])
            told["evaluate_ms"] = [timed(trainer.evaluate, path)[0] for path in paths]
    print(f"  engine: train {statistics.median(second):.1f} ms, on a new path {statistics.median(first):.1f}, first minus second: p95 {told['first_minus_second_p95_ms']:.1f}, "
          f"max {told['first_minus_second_max_ms']:.1f}; queued in {told['queued_ms']:.1f}; evaluate {statistics.median(told['evaluate_ms']):.1f} ms", flush=True)  # fmt: skip
    return told


def eager_steps(trainer, paths, patience):
    """Each path once before it is timed: plain PyTorch has to choose its convolutions where a shape is new."""
    train, evaluate, start = [], [], time.perf_counter()
    with engine.using("off"):
        for path in paths:
            trainer.train(path)
            train.append(min(timed(trainer.train, path)[0] for _ in range(2)))
            with bn_mode(trainer.net, "batch"):
                trainer.evaluate(path)
                evaluate.append(min(timed(trainer.evaluate, path)[0] for _ in range(2)))
            if time.perf_counter() - start > patience:
                break
    return {"train": train, "evaluate": evaluate}


def step(spaces, batch, patience=25):
    """A new random path every step, with the engine and eager; memory of the largest path."""
    for name in spaces:
        print(f"{name}, batch {batch}", flush=True)
        trainer = Trainer(name, batch)
        trainer.net.train()
        told = RESULTS.setdefault("step", {})[name] = engine_steps(trainer, trainer.paths[:50])
        for what, eager in eager_steps(trainer, trainer.paths[:50], patience).items():
            ours = told[f"{what}_ms"][: len(eager)]
            told[f"{what}_eager_ms"], ratio = eager, sum(eager) / sum(ours)
            told[f"{what}_ratio"] = ratio
            print(f"  {what}: eager {statistics.median(eager):.1f} ms, engine {statistics.median(ours):.1f} ms on the same {len(eager)} paths: {ratio:.2f}x images/s", flush=True)  # fmt: skip
        largest = [max(range(len(layer.ops)), key=lambda i, layer=layer: layer.cost(layer.ops[i]).macs) for layer in trainer.space.layers]  # fmt: skip
        for mode in ("auto", "off"):
            with engine.using(mode):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                timed(trainer.train, largest)
                told[f"memory_gib_{mode}"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"  memory of the largest path: eager {told['memory_gib_off']:.1f} GiB, engine {told['memory_gib_auto']:.1f} GiB", flush=True)  # fmt: skip
        del trainer
        torch.cuda.empty_cache()


def profile(spaces, batch):
    """Where the time of engine steps goes, by kernel."""
    for name in spaces:
        trainer = Trainer(name, batch)
        trainer.train(trainer.paths[0])
        for what, work in (("train", trainer.train), ("evaluate", trainer.evaluate)):
            work(trainer.paths[3])
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                for path in trainer.paths[3:13]:
                    work(path)
                torch.cuda.synchronize()
            rows = sorted(((e.self_device_time_total / 1e4, e.count / 10, e.key) for e in profiler.key_averages()), reverse=True)  # fmt: skip
            print(f"{name} {what}: {sum(r[0] for r in rows):.1f} ms of kernels a step")
            for ms, count, key in rows[:28]:
                print(f"  {ms:7.3f} ms {count:6.1f}x {key[:110]}")
            RESULTS.setdefault("profile", {})[f"{name} {what}"] = [
                (round(r[0], 4), r[1], r[2][:160]) for r in rows[:60]
            ]
        del trainer


def compiled(spaces, batch):
    """One path compiled whole: what the engine has to beat, though no supernet could be trained so."""
    for name in spaces:
        trainer = Trainer(name, batch)
        subnet = trainer.net.subnet(trainer.paths[3]).train().to(DEVICE, memory_format=torch.channels_last)
        line = {"compile s": 0.0}
        for kind, network in (("compiled", torch.compile(subnet)), ("off", subnet), ("auto", subnet)):
            trainer.net = lambda images, path, network=network: network(images)
            trainer.optimizer = torch.optim.SGD(subnet.parameters(), 0.01, 0.9, nesterov=True)
            with engine.using("off" if kind == "off" else "auto"):
                first = timed(trainer.train, None)[0]
                line["compile s"] += first / 1e3 if kind == "compiled" else 0.0
                for what, work in (("train", trainer.train), ("evaluate", trainer.evaluate)):
                    work(None)
                    line[f"{what} {kind} ms"] = statistics.median(timed(work, None)[0] for _ in range(10))
        print(f"{name}, one path: " + ", ".join(f"{k} {v:.1f}" for k, v in line.items()), flush=True)
        RESULTS.setdefault("compiled", {})[name] = line


def warm(spaces, batch):
    for name in spaces:
        start = time.perf_counter()
        engine.warm_up(load_space(name), batch, DEVICE)
        took = time.perf_counter() - start
        RESULTS.setdefault("warm_up_s", {})[name] = took
        print(f"warm_up({name}): {took:.1f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["warm", "check", "micro", "step", "profile", "compiled"])
    parser.add_argument("--spaces", nargs="+", default=["mobilenet", "mobilenet-se"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    RESULTS.update(device=torch.cuda.get_device_name(), torch=torch.__version__, copy_tb_per_s=bandwidth / 1e12)
    print(f"{RESULTS['device']}, torch {torch.__version__}, copies move {bandwidth / 1e12:.2f} TB/s", flush=True)
    for part in arguments.parts:
        start = time.perf_counter()
        try:
            if part == "check":
                check()
            elif part == "micro":
                micro(arguments.batch, bandwidth)
            else:
                globals()[part](arguments.spaces, arguments.batch)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)
        (arguments.out / "engine.json").write_text(json.dumps(RESULTS))


if __name__ == "__main__":
    main()
