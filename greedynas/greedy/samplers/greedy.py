"""The paper's sampler: paths from the space and the candidate pool, filtered by their loss before they are trained."""

from greedynas.greedy.filtering import filter_paths
from greedynas.greedy.samplers.sampler import Draw, Drawn, Sampler


class Greedy(Sampler):
    """Keeps the k best of m paths (Algorithm 1), and samples uniformly during warm-up."""

    filters = True

    def draw(self, draw: Draw) -> Drawn:
        if not draw.filters:
            return Drawn([draw.uniform()])
        k = draw.settings.k
        m = draw.settings.m if draw.settings.filtering else k  # the ablation without filtering trains all sampled paths
        filtered = filter_paths(draw.space, draw.losses, m, k, draw.rng, draw.pool, draw.epsilon, draw.explore).agreed()
        return Drawn([[path] for path, _ in filtered.kept], filtered)
