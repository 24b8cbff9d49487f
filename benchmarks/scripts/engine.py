"""Compare the GPU engine with plain PyTorch (bf16 autocast, channels_last) on this GPU: correctness first, then speed.

    python benchmarks/scripts/engine.py --out DIR            # all parts, about three minutes on an H200
    python benchmarks/scripts/engine.py check micro --out DIR

Parts: warm (compile the kernels of the spaces), check (compare blocks in bf16 with float64), micro (each kernel, with
the share of the measured copy bandwidth), step (training and evaluation of random paths), equal (final losses of
trainings with the engine and without it), profile, compiled (one path, by torch.compile).
"""

import argparse
import json
import statistics
import time
import traceback
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from greedynas.gpu import engine
from greedynas.models.batchnorm import bn_mode
from greedynas.models.blocks import MBConv, initialise
from greedynas.models.engine import warm_up
from greedynas.models.supernet import Supernet
from greedynas.spaces.ops import parse_op
from greedynas.spaces.space import load_space

DEVICE = torch.device("cuda")
RESULTS: dict = {}


def milliseconds(work, repeats=20, warm=3):
    """Return the median time on the device."""
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


def replayed(work, times=10):
    """Return the median time with replay of a graph, so that a short kernel does not wait for its launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return milliseconds(graph.replay, repeats=3, warm=1) / times


def copy_bandwidth():
    """Return the bytes per second of a large copy, counting reads and writes."""
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
    with engine.using(mode), torch.autocast(x.device.type, torch.bfloat16, enabled=precision != "float64"):
        y = block(x)
    y.backward(g.to(y.dtype))
    tensors = {"y": y.detach(), "dx": x.grad}
    tensors |= {name: p.grad for name, p in block.named_parameters()}
    tensors |= {name: b.clone() for name, b in block.named_buffers() if "running" in name}
    return tensors


def cases_of_check():
    """Return blocks of widths that `warm_up` has compiled: channels, stride, expansion, kernel, SE, activation, images,
    size."""
    cases = []
    for se, act in ((False, "relu"), (True, "hard_swish")):
        for kernel in (3, 5, 7):
            cases += [(32, 32, 1, 6, kernel, se, act, 4, 28), (40, 80, 2, 3, kernel, se, act, 4, 28)]
    return [*cases, (32, 16, 1, 1, 3, False, "relu", 4, 28), (16, 32, 2, 6, 3, False, "relu", 4, 28), (96, 96, 1, 6, 5, True, "hard_swish", 8, 14),
            (80, 80, 1, 3, 7, False, "relu", 8, 14), (192, 320, 1, 6, 7, False, "relu", 16, 7), (40, 40, 1, 6, 5, False, "relu", 4, 28)]  # fmt: skip


def check():
    """Compare the errors of the engine and of plain PyTorch in bf16 with float64 on the CPU.

    Those of the engine may be at most 1.5 times as large.
    """
    worst = 0.0
    for case in cases_of_check():
        *shape, images, size = case
        torch.manual_seed(0)
        block = randomise(MBConv(*shape)).cpu()
        x = torch.randn(images, shape[0], size, size).bfloat16().to(memory_format=torch.channels_last)
        with torch.no_grad(), engine.using("off"):
            g = torch.randn_like(deepcopy(block)(x.float()))
        wanted = run_block(deepcopy(block).double(), x, g, "off", "float64")
        plain = run_block(deepcopy(block), x, g, "off", "bf16")
        ours = run_block(deepcopy(block).to(DEVICE), x.to(DEVICE), g.to(DEVICE), "on", "bf16")
        errors = {k: (error(ours[k].cpu(), wanted[k]), error(plain[k], wanted[k])) for k in wanted}
        ratios = {k: mine / (1.5 * theirs + 1e-3) for k, (mine, theirs) in errors.items()}
        name = max(ratios, key=ratios.get)
        worst = max(worst, ratios[name])
        verdict = "ok " if ratios[name] <= 1 else "BAD"
        print(
            f"{verdict} {case}: worst {name}: {errors[name][0]:.1e}, plain {errors[name][1]:.1e}; y {errors['y'][0]:.1e}"
        )
        RESULTS.setdefault("check", []).append({"case": str(case), "worst": name, "ratio": ratios[name]})
    print(f"check: {'all within bounds' if worst <= 1 else 'NOT within bounds'}")


MICRO = [  # in, out, stride, size, expansion, kernel
    (16, 32, 2, 112, 6, 5), (32, 32, 1, 56, 6, 3), (32, 32, 1, 56, 6, 5), (32, 32, 1, 56, 6, 7), (32, 32, 1, 56, 3, 5), (40, 40, 1, 28, 6, 5),
    (80, 80, 1, 14, 6, 5), (96, 96, 1, 14, 3, 7), (192, 192, 1, 7, 6, 5),
]  # fmt: skip


KERNELS = ("expand", "depthwise", "project", "normalise", "sums", "project'", "depthwise'", "expand'")


def kernels_of(i, o, s, size, e, k, batch):
    """Return the kernels of a block in order: the bytes of the tensors that each has to move, and the call."""
    from greedynas.gpu.kernels import depthwise, depthwise_backward, norms, pointwise, pointwise_backward

    block = randomise(MBConv(i, o, s, e, k, False, "relu"))
    x = torch.randn(batch, size, size, i, device=DEVICE).bfloat16()
    w1, w2 = engine._matrix(block.expand.conv, x), engine._matrix(block.project.conv, x)
    weight1, weight2, wd = (part.conv.weight.detach() for part in (block.expand, block.project, block.depthwise))
    a, part = pointwise.forward(x, w1)
    v1 = norms.finish_norm(block.expand.norm, part)
    b, part = depthwise.forward(a, wd, s, v1, "relu")
    v2 = norms.finish_norm(block.depthwise.norm, part)
    d, part = pointwise.forward(b, w2, v2, "relu")
    v3 = norms.finish_norm(block.project.norm, part)
    g = torch.randn_like(d)
    coef3, _, _ = norms.finish_gradient(v3, norms.gradient_sums(g, d, v3), d.numel() // o, True)
    gb, part, _ = pointwise_backward.narrowing(g, d, coef3, w2, weight2, b, v2, "relu")
    coef2, _, _ = norms.finish_gradient(v2, part, d.numel() // o, True)
    ga, part, _ = depthwise_backward.backward(gb, b, coef2, a, wd, s, v1, "relu")
    coef1, _, _ = norms.finish_gradient(v1, part, x.numel() // i, True)
    X, A, B, D = x.nbytes, a.nbytes, b.nbytes, d.nbytes
    residual = x if i == o and s == 1 else None
    calls = (
        (X + A, lambda: pointwise.forward(x, w1)),
        (A + B, lambda: depthwise.forward(a, wd, s, v1, "relu")),
        (B + D, lambda: pointwise.forward(b, w2, v2, "relu")),
        (2 * D + X * (residual is not None), lambda: norms.normalise(d, v3, residual)),
        (2 * D, lambda: norms.gradient_sums(g, d, v3)),
        (2 * B + 2 * D, lambda: pointwise_backward.narrowing(g, d, coef3, w2, weight2, b, v2, "relu")),
        (2 * B + 2 * A, lambda: depthwise_backward.backward(gb, b, coef2, a, wd, s, v1, "relu")),
        (2 * A + 3 * X, lambda: pointwise_backward.widening(ga, a, coef1, w1, weight1, x, x)),
    )
    return dict(zip(KERNELS, calls, strict=True))


def micro(batch, bandwidth):
    """Print the time of each kernel of a block in microseconds, and the time to copy its tensors as a share of it."""
    print(f"{'block':>26} " + " ".join(f"{name:>15}" for name in (*KERNELS, "total")))
    for shape in MICRO:
        line, total, floors = [], 0.0, 0.0
        for name, (moved, work) in kernels_of(*shape, batch).items():
            ms = replayed(work)
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
    """Steps of a supernet on random images, with the engine or without it."""

    def __init__(self, name, batch, seed=0):
        self.space = load_space(name)
        self.net = Supernet(self.space, generator=torch.Generator().manual_seed(seed)).to(DEVICE, memory_format=torch.channels_last)  # fmt: skip
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01, 0.9, nesterov=True)
        size = self.space.image_size
        self.images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
        self.labels = torch.randint(self.space.num_classes, (batch,), device=DEVICE)
        self.paths = self.space.sample(200, np.random.default_rng(0)).tolist()
        for p in self.net.parameters():  # as after many steps, because SGD is slower if a momentum is missing
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)

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
    """Return the milliseconds until the work is done, and until it is queued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work(*arguments)
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), 1e3 * queued


def in_a_row(work, paths, rounds=3):
    """Return the milliseconds per step of the best round, without synchronisation between steps, as in training."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for path in paths:
            work(path)
        torch.cuda.synchronize()
        best = min(best, 1e3 * (time.perf_counter() - start) / len(paths))
    return best


def new_paths(trainer, paths):
    """Measure the extra cost of a new path with the engine, by running each path twice."""
    with engine.using("auto"):
        for path in trainer.paths[-3:]:
            trainer.train(path)
        pairs = [(timed(trainer.train, path)[0], *timed(trainer.train, path)) for path in paths]
    first, second, queued = (list(column) for column in zip(*pairs, strict=True))
    stalls = np.subtract(first, second)
    measured = {"new_path_ms": first, "second_ms": second, "queued_ms": statistics.median(queued)}
    measured |= {"first_minus_second_p95_ms": float(np.percentile(stalls, 95)), "first_minus_second_max_ms": float(stalls.max())}  # fmt: skip
    print(f"  {len(paths)} new paths: median {statistics.median(first):.1f} ms, first minus second: p95 {measured['first_minus_second_p95_ms']:.1f}, "
          f"max {measured['first_minus_second_max_ms']:.1f}; Python queues a step in {measured['queued_ms']:.1f} ms", flush=True)  # fmt: skip
    return measured


def floor_bytes(space, path, batch, training):
    """Return the bytes of the activations that must be moved, each read and written once by a kernel that needs it."""
    total = 0
    for layer, op in zip((*space.stem_layers, *space.layers, *space.head_layers), (*(0 for _ in space.stem_layers), *path, *(0 for _ in space.head_layers)), strict=True):  # fmt: skip
        if layer.is_nothing(layer.ops[op]):
            continue
        kind, pixels, after = parse_op(layer.ops[op]), layer.in_size**2, (-(-layer.in_size // layer.stride)) ** 2
        x, d = (2 * batch * p * c for p, c in ((pixels, layer.in_channels), (after, layer.out_channels)))
        if kind.family != "MB":
            total += x + 3 * d + (x * 2 + 5 * d if training else 0)
            continue
        hidden = kind.expansion * layer.in_channels
        a, b = (2 * batch * p * hidden for p in (pixels, after))
        a = a if kind.expansion > 1 else 0
        residual = x if x == d and layer.stride == 1 else 0
        total += (x + a if a else 0) + (a or x) + 2 * b + 3 * d + residual
        if training:
            total += 4 * d + 2 * b + 2 * b + 2 * (a or x) + (2 * a + 2 * x if a else 0) + residual
    return total


def after_eager(name, batch, count):
    """Return a trainer after its first eager paths, for whose new shapes PyTorch has to choose convolutions."""
    trainer = Trainer(name, batch)
    trainer.net.train()
    start = time.perf_counter()
    with engine.using("off"):
        for path in trainer.paths[:count]:
            trainer.train(path)
    measured = RESULTS.setdefault("step", {})[name] = {"paths": count, "eager_first_s": time.perf_counter() - start}
    print(
        f"{name}, batch {batch}; the first run of {count} paths took eager {measured['eager_first_s']:.0f} s",
        flush=True,
    )
    return trainer


def measure(trainer, bandwidth):
    """Measure the same random paths, plain and with the engine; new paths; and the memory of the largest path."""
    measured, batch = RESULTS["step"][trainer.space.name], len(trainer.images)
    paths = trainer.paths[: measured["paths"]]
    print(trainer.space.name)
    measured |= new_paths(trainer, trainer.paths[len(paths) : len(paths) + 50])
    for what, work in (("train", trainer.train), ("evaluate", trainer.evaluate)):
        with bn_mode(trainer.net, "batch") if what == "evaluate" else nullcontext():
            for mode in ("off", "auto"):
                with engine.using(mode):
                    work(paths[0])
                    alone = [timed(work, path)[0] for path in paths]
                    measured[f"{what}_{mode}_ms"], measured[f"{what}_{mode}_alone_ms"] = in_a_row(work, paths), alone
        eager, ours = measured[f"{what}_off_ms"], measured[f"{what}_auto_ms"]
        measured[f"{what}_ratio"] = eager / ours
        floor = statistics.mean(floor_bytes(trainer.space, path, batch, what == "train") for path in paths) / bandwidth
        measured[f"{what}_floor_ms"] = floor = 1e3 * floor
        print(f"  {what}, the same {len(paths)} paths in a row: eager {eager:.1f} ms, engine {ours:.1f} ms a step: {eager / ours:.2f}x images/s; "
              f"waited for one by one (medians): {statistics.median(measured[f'{what}_off_alone_ms']):.1f} and {statistics.median(measured[f'{what}_auto_alone_ms']):.1f} ms; "
              f"moving the activations at copy speed takes {floor:.1f} ms", flush=True)  # fmt: skip
    largest = [max(range(len(layer.ops)), key=lambda i, layer=layer: layer.cost(layer.ops[i]).macs) for layer in trainer.space.layers]  # fmt: skip
    for mode in ("auto", "off"):
        with engine.using(mode):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            timed(trainer.train, largest)
            measured[f"memory_gib_{mode}"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"  memory that a step on the largest path takes: eager {measured['memory_gib_off']:.1f} GiB, engine {measured['memory_gib_auto']:.1f} GiB", flush=True)  # fmt: skip


def step(spaces, batch, bandwidth, count=8):
    for name in spaces:
        measure(after_eager(name, batch, count), bandwidth)
        torch.cuda.empty_cache()


def equal(steps=200, batch=128, seeds=3):
    """Compare the final losses of `macro` with the engine and without it, on blurred patterns with noise."""
    ends = {"auto": [], "off": []}
    for seed in range(seeds):
        for mode in ends:
            trainer = Trainer("macro", batch, seed)
            trainer.net.train()
            generator = torch.Generator(DEVICE).manual_seed(seed)
            patterns = torch.randn(10, 3, 4, 4, device=DEVICE, generator=generator)
            patterns = F.interpolate(patterns, size=32, mode="bilinear")
            losses = []
            with engine.using(mode):
                for path in trainer.space.sample(steps, np.random.default_rng(seed)).tolist():
                    trainer.labels = torch.randint(10, (batch,), device=DEVICE, generator=generator)
                    noise = torch.randn(batch, 3, 32, 32, device=DEVICE, generator=generator)
                    trainer.images = (patterns[trainer.labels] + 4 * noise).to(memory_format=torch.channels_last)
                    losses.append(trainer.train(path))
            ends[mode].append(torch.stack(losses)[-steps // 4 :].mean().item())
    RESULTS["equal"] = ends
    print(f"loss of the last quarter of {steps} steps, seeds 0 to {seeds - 1}: engine {ends['auto']}, plain {ends['off']}", flush=True)  # fmt: skip


def profile(spaces, batch):
    """Print the time of engine steps by kernel."""
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
    """Measure one path compiled as a whole, which is the speed to beat, although no supernet could be trained like
    this."""
    for name in spaces:
        trainer = Trainer(name, batch)
        subnet = trainer.net.subnet(trainer.paths[3]).train().to(DEVICE, memory_format=torch.channels_last)
        line = {"compile s": 0.0}
        for kind, network in (("compiled", torch.compile(subnet)), ("off", subnet), ("auto", subnet)):
            trainer.net = lambda images, path, network=network: network(images)
            trainer.optimizer = torch.optim.SGD(subnet.parameters(), 0.01, 0.9, nesterov=True)
            with engine.using("auto" if kind == "auto" else "off"):
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
        warm_up(load_space(name), batch, DEVICE)
        took = time.perf_counter() - start
        RESULTS.setdefault("warm_up_s", {})[name] = took
        print(f"warm_up({name}): {took:.1f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["warm", "check", "micro", "step", "equal", "profile", "compiled"])
    parser.add_argument("--spaces", nargs="+", default=["mobilenet", "mobilenet-se"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    bandwidth = copy_bandwidth()
    RESULTS.update(device=torch.cuda.get_device_name(), torch=torch.__version__, copy_tb_per_s=bandwidth / 1e12)
    print(f"{RESULTS['device']}, torch {torch.__version__}, copies move {bandwidth / 1e12:.2f} TB/s", flush=True)
    for part in arguments.parts:
        start = time.perf_counter()
        try:
            if part in ("check", "equal"):
                globals()[part]()
            elif part == "micro":
                micro(arguments.batch, bandwidth)
            elif part == "step":
                step(arguments.spaces, arguments.batch, bandwidth)
            else:
                globals()[part](arguments.spaces, arguments.batch)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)
        (arguments.out / "engine.json").write_text(json.dumps(RESULTS))


if __name__ == "__main__":
    main()
