"""MoELayer and the router on one GPU."""

import pytest
import torch

from mok_torch import InProcessGroup, MoELayer, RankTimeoutError, ops
from mok_torch.groups import SingleRank
from mok_torch.reference import relative_error, worst_row_error
from mok_torch.self_test import run_on_ranks

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_logits_do_not_depend_on_the_other_tokens(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 1000, generator=generator).to(dtype).cuda()
    weight = torch.randn(97, 1000, generator=generator).cuda()
    logits = ops.router_logits(x, weight)
    assert relative_error(logits.cpu(), x.double().cpu() @ weight.double().cpu().T) < 1e-5
    for begin, end in ((0, 1), (1, 3), (17, 1200), (2999, 3000), (5, 69)):
        assert torch.equal(ops.router_logits(x[begin:end], weight), logits[begin:end])
    turned = x.flip(0)
    assert torch.equal(ops.router_logits(turned, weight).flip(0), logits)


def test_router_logits_have_gradients():
    x = torch.randn(70, 40, device="cuda", requires_grad=True)
    weight = torch.randn(9, 40, device="cuda", requires_grad=True)
    d_logits = torch.randn(70, 9, device="cuda")
    ops.router_logits(x, weight).backward(d_logits)
    assert relative_error(x.grad, d_logits.double() @ weight.double()) < 1e-5
    assert relative_error(weight.grad, d_logits.double().T @ x.double()) < 1e-5


LAYERS = {
    "softmax": {"scoring": "softmax"},
    "sigmoid, groups": {"scoring": "sigmoid", "n_group": 4, "topk_group": 2},
    "sqrtsoftplus": {"scoring": "sqrtsoftplus", "routed_scaling_factor": 2.5},
    "shared": {"shared_intermediate_size": 64},
    "gated": {"shared_intermediate_size": 64, "shared_gate": True, "swiglu_limit": 7.0},
    "blocks": {"shared_intermediate_size": 64, "gradient_block": 64},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_a_layer_equals_its_copy_on_the_cpu(options):
    torch.manual_seed(0)
    layer = MoELayer(128, 96, 16, 4, dtype=BF16, **options).eval()
    x = torch.randn(4, 75, 128).to(BF16)
    with torch.no_grad():
        expected = layer(x)
        layer.cuda()
        out = layer(x.cuda())
        # A token's output depends on nothing else in the batch.
        part = layer(x.cuda().view(300, 128)[64:192])
    assert torch.equal(part, out.view(300, 128)[64:192])
    assert relative_error(out.cpu(), expected) < 4e-3
    assert worst_row_error(out.cpu(), expected) < 2e-2
    assert layer.expert_load.sum() == 128 * 4


def test_fp32_parameters_and_autocast():
    torch.manual_seed(0)
    layer = MoELayer(128, 96, 16, 4, precision="bf16", dtype=torch.float32).eval()
    x = torch.randn(50, 128)
    with torch.no_grad():
        expected = layer(x)
        out = layer.cuda()(x.cuda())
        assert out.dtype == torch.float32
        assert relative_error(out.cpu(), expected) < 4e-3
        with torch.autocast("cuda", dtype=BF16):
            assert torch.equal(layer(x.cuda()), out)


def test_reserve_makes_what_is_unusable_anew():
    layer = MoELayer(128, 96, 16, 4, dtype=BF16, device="cuda").eval()
    x = torch.randn(75, 128).to(BF16).cuda()
    key = (x.device, 128, 4, BF16)

    def raise_timeout():
        raise RankTimeoutError("a pass has not ended")

    with torch.no_grad():
        expected = layer(x)
        broken = SingleRank.workspaces[key]
        broken.engine.check_usable = raise_timeout
        layer.reserve(1000)
        made = SingleRank.workspaces[key]
        assert made is not broken and made.num_local_tokens == 1000
        assert torch.equal(layer(x), expected)


def test_layers_of_ranks_that_share_the_gpu():
    torch.manual_seed(0)
    x = torch.randn(90, 128).to(BF16).cuda()

    def make(group=None):
        torch.manual_seed(11)
        options = {"shared_intermediate_size": 64, "dtype": BF16, "device": "cuda"}
        return MoELayer(128, 96, 10, 4, group=group, **options).eval()

    with torch.no_grad():
        expected = make()(x)
    group, bounds = InProcessGroup(3), (0, 20, 20, 90)
    # One after the other: they draw from the process's random generator.
    layers = [make(group.member(rank)) for rank in range(3)]

    def run(member, rank):
        del member
        with torch.no_grad():
            return layers[rank](x[bounds[rank] : bounds[rank + 1]])

    parts = run_on_ranks(run, 3)
    assert torch.equal(torch.cat(parts), expected)
