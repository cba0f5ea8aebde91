"""The training loop, as each rank runs it."""

import contextlib
import dataclasses
import hashlib
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from examples.train_lm import gpu, ranks
from examples.train_lm.data import Corpus, python_help_text
from examples.train_lm.model import LanguageModel, ModelConfig
from examples.train_lm.report import Report
from mok_torch import RankTimeoutError
from mok_torch.full_state import full_state_dict
from mok_torch.functional import MoKConfig

_VALIDATION_SEQUENCES = 64
_BIAS_RATE = 1e-2  # A long training would take 1e-3.
_GPU_STEPS_BETWEEN_REPORTS = 10  # A report waits for the GPU.


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
    device: str = "cpu"
    cuda_graph: bool = False
    timeout_s: float = MoKConfig.timeout_seconds  # how long ranks wait for each other


class DivergedError(RuntimeError):
    """The loss is no number any more. Raised on every rank, at the same step."""


def learning_rate_share(step: int, steps: int) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def make_optimizer(model: LanguageModel, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; its learning rate is set before each step.

    On GPUs one kernel for all parameters, whose learning rate and step count stay on the device.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if device.type == "cpu":
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    rate = torch.zeros((), device=device)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Of the next step; on a GPU in the place that a captured step reads it from."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients(model: LanguageModel, limit: float = 1.0) -> None:
    """Scales all gradients so that their norm over the whole model is at most limit. Collective."""
    replicated = _norms([parameter.grad for parameter in model.replicated_parameters()])
    # One number an expert, so that it does not matter which rank holds it.
    parameters = model.expert_parameters()
    own = _norms([gradient for parameter in parameters for gradient in parameter.grad.unbind()])
    first, end = model.moe_layers[0].owned_experts(dist.get_rank())
    experts = replicated.new_zeros(len(parameters), model.config.experts)
    experts[:, first:end] = own.view(len(parameters), end - first)
    norms = torch.cat([replicated, ranks.sum_over_ranks(experts).flatten()])
    norm = torch.linalg.vector_norm(norms)
    scale = (limit / norm).clamp(max=1.0).float()
    torch._foreach_mul_([parameter.grad for parameter in model.parameters()], scale)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Of each tensor its norm, float64; its bits depend on no other tensor."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def balance_experts(model: LanguageModel) -> Tensor:
    """Moves the routers' biases; returns routes per layer and expert [layers, E]. Collective."""
    loads = ranks.sum_over_ranks(torch.stack([layer.expert_load for layer in model.moe_layers]))
    for layer, load in zip(model.moe_layers, loads, strict=True):
        layer.update_expert_bias(_BIAS_RATE, load)
    return loads


def mean_loss(losses: Tensor) -> Tensor:
    """Mean over the tokens of all ranks, added in an order that no split changes. Collective."""
    return ranks.concatenate_over_ranks(losses.detach()).double().mean()


@torch.no_grad()
def validation_loss(
    model: LanguageModel, corpus: Corpus, batch: int, device: torch.device | str = "cpu"
) -> float:
    """Nats per byte on text that the training never saw. Collective."""
    windows = corpus.validation_windows(_VALIDATION_SEQUENCES, model.config.context).to(device)
    total = 0.0
    for tokens in windows.split(batch):
        # The last batch may be short: repeated windows, whose losses do not count, fill it, so that
        # every rank has an equal share, and all its groups are whole.
        unit = dist.get_world_size() * model.config.sequences_at_once
        padding = tokens[:1].expand(-len(tokens) % unit, -1)
        losses = model(ranks.share_of_rank(torch.cat([tokens, padding])))
        whole = ranks.concatenate_over_ranks(losses)[: len(tokens)]
        total += float(whole.double().sum())
    return total / windows[:, 1:].numel()


class TrainingStep:
    """One step of the training on this rank. Nothing in it waits for a GPU."""

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer, batch: int):
        """batch: sequences of a step, over all ranks."""
        self._model = model
        self._optimizer = optimizer
        self._tokens = batch * model.config.context

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's sequences [B, S + 1] -> the loss, and routes per layer and expert, of all
        ranks. Collective."""
        losses = self._model(batch)
        (losses.sum() / self._tokens).backward()
        ranks.sum_gradients(self._model.replicated_parameters())
        clip_gradients(self._model)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return mean_loss(losses), balance_experts(self._model)


class Progress:
    """Hands the steps' results to the report in bundles, since reading them waits for a GPU.

    Raises DivergedError with the first loss that is infinite or NaN.
    """

    def __init__(self, report: Report | None, tokens_per_step: int, steps_per_bundle: int):
        self._report = report
        self._tokens_per_step = tokens_per_step
        self._steps_per_bundle = steps_per_bundle
        self._bundle: list[tuple[Tensor, Tensor]] = []
        self._steps = 0  # before the bundle
        self._begin = time.perf_counter()

    def add(self, loss: Tensor, loads: Tensor) -> None:
        self._bundle.append((loss, loads))
        if len(self._bundle) == self._steps_per_bundle:
            self.flush()

    def flush(self) -> None:
        """Reports what has not been reported."""
        losses = [float(loss) for loss, _ in self._bundle]
        seconds = time.perf_counter() - self._begin
        rate = self._tokens_per_step * len(losses) / seconds
        for index, (loss, (_, loads)) in enumerate(zip(losses, self._bundle, strict=True)):
            if not math.isfinite(loss):
                raise DivergedError(f"the loss of step {self._steps + index} is {loss}")
            if self._report:
                self._report.step(loss, rate, loads.cpu())
        self._steps += len(losses)
        self._bundle.clear()
        self._begin = time.perf_counter()


def weights_digest(state: dict[str, Tensor]) -> str:
    """SHA-256 over the names and the bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _make_model(rank: int, settings: Settings) -> tuple[LanguageModel, torch.device]:
    """The model of this rank, drawn from the seed on every device alike, and where it is."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        gpu.repeat_bit_for_bit()
    # One thread: a sum that threads share has its order from their number.
    torch.set_num_threads(1)
    threads = max(1, len(os.sched_getaffinity(0)) // settings.ranks)
    torch.manual_seed(settings.seed)
    engine = MoKConfig(num_threads=threads, timeout_seconds=settings.timeout_s)
    return LanguageModel(settings.model, dist.group.WORLD, engine).to(device), device


def train(rank: int, settings: Settings) -> None:
    """Trains on one rank; rank 0 reports and writes the checkpoint."""
    model, device = _make_model(rank, settings)
    optimizer = make_optimizer(model, device)
    step = TrainingStep(model, optimizer, settings.batch)
    if settings.cuda_graph:
        step = gpu.GraphedStep(step)
    corpus = Corpus.from_text(python_help_text())
    order = torch.Generator().manual_seed(settings.seed)
    bundle = 1 if device.type == "cpu" else _GPU_STEPS_BETWEEN_REPORTS

    report = Report(settings.steps, settings.loss_log) if rank == 0 else None
    with report or contextlib.nullcontext():
        progress = Progress(report, settings.batch * settings.model.context, bundle)
        for index in range(settings.steps):
            share = learning_rate_share(index, settings.steps)
            set_learning_rate(optimizer, settings.learning_rate * share)
            batch = corpus.batch(order, settings.batch, settings.model.context)
            progress.add(*step(gpu.to_device(ranks.share_of_rank(batch), device)))
        progress.flush()
    validation = validation_loss(model, corpus, settings.batch, device)
    state = full_state_dict(model)
    if report:
        state = {name: tensor.cpu() for name, tensor in state.items()}
        checkpoint = {
            "config": dataclasses.asdict(settings.model),
            "model": state,
            "digest": weights_digest(state),
            "history": report.history,
            "validation_loss": validation,
        }
        torch.save(checkpoint, settings.checkpoint)


def train_or_exit(rank: int, settings: Settings) -> None:
    """As train; where it diverges or loses a rank, the process ends with a message and status 1."""
    try:
        train(rank, settings)
    except DivergedError as error:
        if rank == 0:
            _complain(f"{error}, no checkpoint written; try a smaller --learning_rate")
        dist.barrier()  # the first rank that exits ends the others
        sys.exit(1)
    except (RankTimeoutError, ranks.LostRankError) as error:
        _complain(f"{error} (--timeout_s={settings.timeout_s:g})")
        sys.exit(1)


def _complain(text: str) -> None:
    print(f"train_lm: {text}", file=sys.stderr, flush=True)
