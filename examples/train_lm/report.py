"""What the user sees: the progress bar, the loss log and the plot."""

import json
import pathlib
import statistics

import rich.console
import rich.progress
from torch import Tensor

_BARS = "▁▂▃▄▅▆▇█"


def load_bars(load: list[int]) -> str:
    """One character per expert, as high as its share of the routes; full is twice the mean."""
    full = 2 * statistics.fmean(load) or 1.0
    return "".join(_BARS[min(7, int(8 * routes / full))] for routes in load)


class Report:
    """Shows and records the training on rank 0; the other ranks have none.

    Attributes:
      history: one {"step", "loss", "tokens_per_s", "imbalance"} a step; imbalance is the load of
        the busiest expert of any layer over the mean.
    """

    def __init__(self, num_steps: int, loss_log: str | None):
        self.history: list[dict] = []
        self._num_steps = num_steps
        self._log = None
        if loss_log:
            self._log = pathlib.Path(loss_log).open("w", encoding="utf-8")  # noqa: SIM115
        self._console = rich.console.Console()
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}/{task.total}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_steps)

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exception):
        self._progress.stop()
        if self._log:
            self._log.close()

    def step(self, loss: float, tokens_per_s: float, loads: Tensor) -> None:
        """Adds a step. loads: routes per layer and expert over all ranks, int64 [layers, E]."""
        step = len(self.history)
        imbalance = float(loads.max(dim=1).values.double().div(loads.double().mean(dim=1)).max())
        record = {"step": step, "loss": loss, "tokens_per_s": round(tokens_per_s, 1)}
        self.history.append({**record, "imbalance": imbalance})
        if self._log:
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
        text = (
            f"loss {loss:.3f}  {tokens_per_s:6.0f} tokens/s  "
            f"expert load {load_bars(loads.sum(dim=0).tolist())} (busiest {imbalance:.2f}x)"
        )
        self._progress.update(self._task, completed=step + 1, description=text)
        every = max(1, self._num_steps // 10)
        if not self._console.is_terminal and (step % every == 0 or step + 1 == self._num_steps):
            self._console.print(f"step {step:4d}  {text}", soft_wrap=True, highlight=False)


def plot(path: str, history: list[dict], unigram: float, validation: float) -> None:
    """Writes the loss and expert-load curves as a PNG."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = [record["step"] for record in history]
    above.plot(steps, [record["loss"] for record in history], label="training loss")
    above.axhline(unigram, linestyle=":", color="gray", label="unigram entropy of the text")
    above.axhline(
        validation, linestyle="--", color="tab:orange", label="validation loss at the end"
    )
    above.set_ylabel("nats per byte")
    above.legend()
    below.plot(steps, [record["imbalance"] for record in history], color="tab:green")
    below.axhline(1.0, linestyle=":", color="gray")
    below.set_ylabel("busiest expert / mean")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
