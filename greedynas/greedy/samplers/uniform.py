"""Uniform sampling (Single Path One-Shot, Guo et al., ECCV 2020): every path is equally likely at every update."""

from greedynas.greedy.samplers.sampler import Draw, Drawn, Sampler


class Uniform(Sampler):
    """Draws one path for each update, uniformly over the space."""

    def draw(self, draw: Draw) -> Drawn:
        return Drawn([draw.uniform()])
