"""The adapters' arithmetic, on two processes: stand-ins do what the libraries document.

Whether their documents were understood, only the libraries themselves can show.
"""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import sys, types
import torch, torch.distributed as dist
from absl import app
from torch.nn import functional as F
from benchmarks.layer import layer


class Event:
    def current_stream_wait(self):
        pass


class ElasticBuffer:
    def __init__(self, group, num_max_tokens_per_rank, hidden, num_topk):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.tokens = num_max_tokens_per_rank  # every rank has as many here

    def get_theoretical_num_sms(self, num_experts, num_topk):
        return 24

    def gather(self, own):
        everyone = own.new_empty(self.ranks * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own.contiguous())
        return everyone

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_experts=None,
                 num_max_tokens_per_rank=None, num_sms=0, async_with_compute_stream=False):
        idx = weights = None
        if handle is None:
            local = self.gather(topk_idx) - self.rank * (num_experts // self.ranks)
            mine = (local >= 0) & (local < num_experts // self.ranks)
            handle = torch.nonzero(mine.any(1))[:, 0]  # tokens that come here
            idx = torch.where(mine, local, -1)[handle]
            weights = self.gather(topk_weights)[handle]
        return self.gather(x)[handle], idx, weights, handle, Event()

    def combine(self, x, handle, topk_weights=None, num_sms=0, async_with_compute_stream=False):
        def to_sources(rows):
            everyone = rows.new_zeros(self.ranks * self.tokens, rows.shape[1])
            everyone[handle] = rows
            out = rows.new_empty(self.tokens, rows.shape[1])
            dist.reduce_scatter_tensor(out, everyone)
            return out

        weights = None if topk_weights is None else to_sources(topk_weights)
        return to_sources(x), weights, Event()


class GroupedLinear(torch.nn.Module):
    def __init__(self, num_gemms, in_features, out_features, bias, params_dtype):
        super().__init__()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            self.register_parameter(f"weight{i}", weight)

    def forward(self, inp, m_splits):
        parts = inp.split(m_splits)
        return torch.cat([F.linear(a, getattr(self, f"weight{i}")) for i, a in enumerate(parts)])


def moe_general_routing_inputs(x, scores, tokens, experts, w1, b1, w2, b2, E, stream, activation):
    assert (tokens.diff() >= 0).all() and w1.stride()[2] > w1.stride()[0] > w1.stride()[1] == 1
    out = torch.zeros_like(x)
    for e in range(E):
        at = torch.nonzero(experts == e)[:, 0]
        both = F.linear(x[tokens[at]], w1[:, :, e])
        y = F.linear(F.silu(both[:, 0::2]) * both[:, 1::2], w2[:, :, e])
        out = out.index_add(0, tokens[at], scores[at].unsqueeze(1) * y)
    return out, None


def module(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


module("deep_ep", ElasticBuffer=ElasticBuffer)
module("transformer_engine")
module("transformer_engine.pytorch", GroupedLinear=GroupedLinear)
module("sonicmoe")
module("sonicmoe.enums", ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
module("sonicmoe.functional", moe_general_routing_inputs=moe_general_routing_inputs)
torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=0)
layer._measure_case = lambda *arguments: sys.exit(0)  # the check is what this is about
app.run(layer.main)
"""

NAMES = ("deep_ep_grouped_mm", "deep_ep_cublas", "transformer_engine", "sonic_moe")


@pytest.mark.parametrize("name", NAMES)
def test_adapter_is_right_where_its_library_does_what_it_documents(name):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        arguments = ["--backend=gloo", "--device=cpu", "--model=tiny", "--family=model"]
        command = [sys.executable, "-c", PROGRAM, *arguments, f"--layer={name}"]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = [process.communicate(timeout=250) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert "error against float64 at most" in results[0][0]
