"""Finding out why a model gives logits that are no finite numbers."""

from __future__ import annotations

import torch

from edgexpert.kernels.modules import weights_of
from edgexpert.model.host import HostedModel


def explain_not_finite(host: HostedModel) -> str:
    """What a user can do about it: names the first weight that is not finite, where there is one."""
    for name, weight in weights_of(host.model):
        if not weight.is_meta and weight.is_floating_point() and not torch.isfinite(weight).all():
            return f"the weight {name} is not finite, so the model gives no text; get a complete copy of the checkpoint"
    for block in host.blocks:
        for part in ("gate_up", "down") if block.packed is not None else ():
            matrices = getattr(block.packed, part)
            floats = matrices.values if matrices.scales is None else matrices.scales
            for expert in range(block.num_experts):
                if not torch.isfinite(floats[expert]).all():
                    return (f"the packed weights of layer {block.layer}, expert {expert} ({part}) are not finite, so the model "
                            "gives no text; convert the checkpoint again")
    return ("the model's logits are not finite although its weights are; the numbers leave the range of "
            f"{str(host.model.dtype).removeprefix('torch.')}, so load it with `dtype` float32")
