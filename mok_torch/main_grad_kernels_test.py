"""gradient_accumulation_fusion where the host stands in for a GPU: what the kernels are given."""

import pytest
import torch

from mok_torch.cuda_test_support import CASE, let_host_be_gpu, make_space
from mok_torch.main_grad_test_support import BF16, Inputs


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
def test_on_a_gpu_the_kernels_get_the_buffers(monkeypatch, weight_dtype):
    """Checked and recognised calls; the buffers of the time of the backward."""
    let_host_be_gpu(monkeypatch)
    space = make_space()
    inputs = Inputs(CASE, weight_dtype=weight_dtype)
    for _ in range(2):
        out = inputs.moe(workspace=space)
        for weight in inputs.weights:
            weight.main_grad = torch.zeros(weight.shape)
            weight.grad_added_to_main_grad = False
        out.backward(inputs.d_out)
        name, _, args = space.engine.calls[-1]
        addresses = [buffer.data_ptr() for buffer in inputs.main_grads()]
        struct = (args.d_routed, args.d_shared)
        assert name == "backward" and all(grads.accumulate for grads in struct)
        given = [getattr(grads, part) for grads in struct for part in ("gate", "up", "down")]
        assert given == addresses
        assert all(weight.grad_added_to_main_grad for weight in inputs.weights)
        del inputs.weights[4].main_grad
        with pytest.raises(ValueError, match=r"shared.w_up.main_grad: expected a tensor"):
            inputs.moe(workspace=space)
        inputs.weights[4].main_grad = torch.zeros(inputs.weights[4].shape)
