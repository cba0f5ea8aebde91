"""The training loop, as each rank runs it."""

import contextlib
import dataclasses
import math
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

from examples.train_lm import ranks
from examples.train_lm.data import Corpus, python_help_text
from examples.train_lm.model import LanguageModel, ModelConfig
from examples.train_lm.report import Report
from mok_torch.full_state import full_state_dict
from mok_torch.functional import MoKConfig

_VALIDATION_SEQUENCES = 64
_BIAS_RATE = 1e-2  # A long training would take 1e-3.


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every rank is told."""

    model: ModelConfig
    ranks: int
    steps: int
    batch: int
    seed: int
    learning_rate: float
    loss_log: str | None
    checkpoint: str


def learning_rate_share(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def make_optimizer(model: LanguageModel, settings: Settings):
    """AdamW, with weight decay on matrices only, and its learning-rate schedule."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(step, settings.steps)
    )
    return optimizer, schedule


def clip_gradients(model: LanguageModel, limit: float = 1.0) -> None:
    """Scales all gradients so that their norm over the whole model is at most limit. Collective."""
    replicated = [_norm(parameter.grad) for parameter in model.replicated_parameters()]
    # One number an expert, so that it does not matter which rank holds it.
    parameters = model.expert_parameters()
    experts = torch.zeros(len(parameters), model.config.experts, dtype=torch.float64)
    first, _ = model.moe_layers[0].owned_experts(dist.get_rank())
    for row, parameter in zip(experts, parameters, strict=True):
        for expert, gradient in enumerate(parameter.grad, start=first):
            row[expert] = _norm(gradient)
    norms = torch.cat([torch.stack(replicated), ranks.sum_over_ranks(experts).flatten()])
    norm = float(_norm(norms))
    if norm > limit:
        for parameter in model.parameters():
            parameter.grad.mul_(limit / norm)


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def balance_experts(model: LanguageModel) -> Tensor:
    """Moves the routers' biases; returns routes per layer and expert [layers, E]. Collective."""
    loads = ranks.sum_over_ranks(torch.stack([layer.expert_load for layer in model.moe_layers]))
    for layer, load in zip(model.moe_layers, loads, strict=True):
        layer.update_expert_bias(_BIAS_RATE, load)
    return loads


def mean_loss(losses: Tensor) -> float:
    """Mean over the tokens of all ranks, added in an order that no split changes. Collective."""
    return float(ranks.concatenate_over_ranks(losses.detach()).double().mean())


@torch.no_grad()
def validation_loss(model: LanguageModel, corpus: Corpus, batch: int) -> float:
    """Nats per byte on text that the training never saw. Collective."""
    windows = corpus.validation_windows(_VALIDATION_SEQUENCES, model.config.context)
    total = 0.0
    for tokens in windows.split(batch):
        # The last batch may be short: repeated windows, whose losses do not count, fill it, so that
        # every rank has an equal share.
        padding = tokens[:1].expand(-len(tokens) % dist.get_world_size(), -1)
        losses = model(ranks.share_of_rank(torch.cat([tokens, padding])))
        whole = ranks.concatenate_over_ranks(losses)[: len(tokens)]
        total += float(whole.double().sum())
    return total / windows[:, 1:].numel()


def train(rank: int, settings: Settings) -> None:
    """Trains on one rank; rank 0 reports and writes the checkpoint."""
    # One thread: a sum that threads share has its order from their number.
    torch.set_num_threads(1)
    threads = max(1, len(os.sched_getaffinity(0)) // settings.ranks)
    torch.manual_seed(settings.seed)
    model = LanguageModel(
        settings.model, torch.distributed.group.WORLD, MoKConfig(num_threads=threads)
    )
    optimizer, schedule = make_optimizer(model, settings)
    corpus = Corpus.from_text(python_help_text())
    order = torch.Generator().manual_seed(settings.seed)
    tokens_per_step = settings.batch * settings.model.context

    report = Report(settings.steps, settings.loss_log) if rank == 0 else None
    with report or contextlib.nullcontext():
        for _ in range(settings.steps):
            begin = time.perf_counter()
            batch = corpus.batch(order, settings.batch, settings.model.context)
            losses = model(ranks.share_of_rank(batch))
            (losses.sum() / tokens_per_step).backward()
            ranks.sum_gradients(model.replicated_parameters())
            clip_gradients(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            loads = balance_experts(model)
            loss = mean_loss(losses)
            if report:
                report.step(loss, tokens_per_step / (time.perf_counter() - begin), loads)
    validation = validation_loss(model, corpus, settings.batch)
    state = full_state_dict(model)
    if report:
        checkpoint = {
            "config": dataclasses.asdict(settings.model),
            "model": state,
            "history": report.history,
            "validation_loss": validation,
        }
        torch.save(checkpoint, settings.checkpoint)
