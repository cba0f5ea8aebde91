"""What is measured: layers of four models, two families of routings, their FLOPs and traffic.

`model`: a model's layer with its top-k, the experts of one rank as at EP 64, and one shared expert.
`ep64`: the link load of EP 64 on any number of ranks: one route a token, 2048 K distinct tokens on
each rank, 63 of 64 routes to another rank. Sending a token once per rank instead of once per route
saves nothing there, as it does not on 64 ranks.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model's layer."""

    hidden: int
    intermediate: int
    topk: int
    local_experts: int


MODELS = {
    "kimi": Model(7168, 2048, 8, 6),
    "glm": Model(6144, 2048, 8, 4),
    "qwen": Model(4096, 1024, 10, 8),
    "deepseek": Model(7168, 3072, 6, 6),
    "tiny": Model(64, 32, 3, 4),  # for tests
}

# Name of a family: tokens per rank (None: 2048 K), routing.
FAMILIES = {
    "model": (2048, "balanced"),
    "model-zipf": (2048, "zipf"),
    "model-8192": (8192, "balanced"),
    "model-8192-zipf": (8192, "zipf"),
    "ep64": (None, "traffic"),
}

_TRAFFIC_SHARED = 256
_LOCAL_OF_64 = 64  # one route in so many stays on its rank


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer on every rank; all ranks have as many tokens and experts."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    topk: int
    local_experts: int
    shared: int
    routing: str

    def flops(self, rows: int) -> float:
        """Of a forward on a rank whose experts get `rows` rows. A backward has twice as many."""
        routed = 6.0 * rows * self.hidden * self.intermediate
        return routed + 6.0 * self.tokens * self.hidden * self.shared


def make_case(model_name: str, family: str, tokens: int | None = None) -> Case:
    """tokens: per rank, instead of the family's."""
    model = MODELS[model_name]
    family_tokens, routing = FAMILIES[family]
    traffic = routing == "traffic"
    return Case(
        name=f"{model_name} {family}",
        tokens=tokens or family_tokens or 2048 * model.topk,
        hidden=model.hidden,
        intermediate=model.intermediate,
        topk=1 if traffic else model.topk,
        local_experts=model.local_experts,
        shared=_TRAFFIC_SHARED if traffic and model_name != "tiny" else model.intermediate,
        routing=routing,
    )


def make_routing(case: Case, ranks: int, seed: int = 0) -> Tensor:
    """int64 [ranks, tokens, topk] on the CPU: global expert ids, distinct for each token.

    One rank may have fewer experts than K; a token then has several routes to some.

    balanced: K experts that follow each other from a random one. zipf: K draws without replacement
    (with it where experts are fewer than K), of which the i-th most popular expert has weight 1/i;
    popularity is shuffled over the ranks.
    traffic: a random expert of the own rank for one token in 64, else of a random other rank.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, local = ranks * case.local_experts, case.local_experts
    total = ranks * case.tokens
    if case.routing == "balanced":
        first = torch.randint(experts, (total, 1), generator=generator)
        routes = (first + torch.arange(case.topk)) % experts
    elif case.routing == "zipf":
        popularity = 1.0 / (1 + torch.randperm(experts, generator=generator)).double()
        routes = torch.multinomial(
            popularity.expand(total, -1), case.topk, case.topk > experts, generator=generator
        )
    else:
        own = torch.arange(ranks).repeat_interleave(case.tokens)
        hop = torch.randint(1, max(ranks, 2), (total,), generator=generator)
        stays = torch.randint(_LOCAL_OF_64, (total,), generator=generator) == 0
        rank = torch.where(stays, own, (own + hop) % ranks)
        routes = (rank * local + torch.randint(local, (total,), generator=generator)).unsqueeze(1)
    return routes.view(ranks, case.tokens, case.topk)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a forward costs the busiest rank and the busiest link direction."""

    rows: int  # of the rank with the most
    link_bytes: float  # dispatch and combine, one copy of a row for each remote route


def load_of(case: Case, routes: Tensor, element_bytes: int = 2) -> Load:
    """routes: as from make_routing."""
    ranks = routes.shape[0]
    owner = routes // case.local_experts
    traffic = torch.zeros(ranks, ranks, dtype=torch.int64)  # [source, owner]
    for source in range(ranks):
        traffic[source] = torch.bincount(owner[source].flatten(), minlength=ranks)
    rows = int(traffic.sum(0).max())
    remote = traffic.clone().fill_diagonal_(0)
    # A rank sends its tokens to the owners and, as an owner, the results back; likewise inwards.
    both = (remote.sum(0) + remote.sum(1)).max()
    return Load(rows, float(both) * case.hidden * element_bytes)
