"""Search by reinforcement learning: a policy over paths, which follows the accuracies of the paths that it samples.

The policy has a distribution over the ops of each layer. The original of neural architecture search (Zoph and Le, ICLR
2017) and its followers MnasNet (Tan et al., CVPR 2019) and MoreMNAS (Chu et al., 2019) have a recurrent network in its
place, which needs many more samples than the thousand that a search on a supernet evaluates. It is trained by REINFORCE
(Williams, Machine Learning, 1992) with the advantages of the sampled paths over each other. Limits are hard: a path that
violates one is drawn again, so that the policy learns from feasible paths alone.
"""

import numpy as np
import torch

from greedynas.greedy.searchers.task import STALE_ROUNDS, Found, Plan, Proposal, Searcher, initial_population
from greedynas.spaces.paths import OpPath

BATCH = 0.2  # share of the population that is sampled between two steps of the policy
RATE = 0.1  # of Adam
BONUS = 0.01  # of the entropy, which keeps the policy from deciding early


def reinforce(plan: Plan) -> Searcher:
    """Propose the initial paths, and then new paths that the policy samples."""
    task, size = plan.task, max(1, round(BATCH * plan.population))
    paths, from_pool = initial_population(task, plan.pool, plan.population, plan.rng(0))
    everything = yield Proposal(paths, from_pool=from_pool)
    policy = Policy(task.space.num_ops)
    policy.learn(everything)
    seen, generation = set(paths), 0
    while True:
        generation += 1
        rng, sampled, rejected = plan.rng(generation), dict[OpPath, None](), 0
        for _ in range(STALE_ROUNDS):
            drawn = policy.sample(4 * size, rng)
            feasible = task.feasible(drawn)
            rejected += int((~feasible).sum())
            sampled.update((path, None) for path in map(tuple, drawn[feasible].tolist()) if path not in seen)
            if len(sampled) >= size:
                break
        chosen = list(sampled)[:size]
        chosen += task.new_random_paths(size - len(chosen), seen | set(chosen), rng)
        if not chosen:
            return  # every feasible path has been evaluated
        seen.update(chosen)
        policy.learn((yield Proposal(chosen, rejected=rejected)))


class Policy:
    """A distribution over the ops of each layer, softmax of its parameters."""

    def __init__(self, num_ops: tuple[int, ...]):
        self.logits = [torch.zeros(count, dtype=torch.float64, requires_grad=True) for count in num_ops]
        self.optimizer = torch.optim.Adam(self.logits, RATE)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return paths (count, layers)."""
        chances = [layer.detach().softmax(0).numpy() for layer in self.logits]
        return np.stack([rng.choice(len(layer), count, p=layer / layer.sum()) for layer in chances], axis=1)

    def learn(self, found: list[Found]) -> None:
        """Take a step towards the paths that are more accurate than the mean of these."""
        accuracies = np.array([entry.accuracy for entry in found])
        spread = accuracies.std()
        if spread == 0:
            return  # they say nothing about each other
        advantages = torch.from_numpy((accuracies - accuracies.mean()) / spread)
        paths = torch.tensor([entry.path for entry in found])
        loss = torch.zeros((), dtype=torch.float64)
        for i, layer in enumerate(self.logits):
            log_p = layer.log_softmax(0)
            loss = loss - (advantages * log_p[paths[:, i]]).mean() + BONUS * (log_p.exp() * log_p).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
