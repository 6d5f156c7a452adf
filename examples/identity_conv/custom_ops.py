"""Builds and loads the operators' library, or loads the one that IDENTITY_CONV_OPS_LIB names.

It adds what only Python can: the class as torch.export sees it, and the operator's derivative.
"""

import os
from pathlib import Path

import torch
from torch._library.fake_class_registry import register_fake_class

library = os.environ.get("IDENTITY_CONV_OPS_LIB")
if library:
    torch.ops.load_library(library)
else:
    import calcops_jit

    sources = ["identity_conv.cpp", "identity_conv.cu"][: 1 + torch.cuda.is_available()]
    library = calcops_jit.load(
        "identity_conv_ops", [Path(__file__).parent / name for name in sources]
    ).path


@register_fake_class("my_ops::IdentityConvClass")
class FakeIdentityConvClass:
    """Stands for an object while a model is traced."""

    def __init__(self, channels: int):
        # The name that __obj_flatten__ gives it: torch.compile looks for it.
        self.channels = channels

    @classmethod
    def __obj_unflatten__(cls, flat):
        return cls(**dict(flat))

    def forward(self, x):
        return torch.empty_like(x)

    def get_channels(self):
        return self.channels


# The Meta kernel in C++ is all that identity_conv_op needs. An operator that takes the object needs
# this: no kernel in C++ can be given the class above. Without it torch.export and torch.compile
# find no kernel for Meta.
@torch.library.register_fake("my_ops::identity_conv_object")
def _(obj, x):
    return torch.empty_like(x)


identity_conv_op = torch.ops.my_ops.identity_conv_op
torch.library.register_autograd("my_ops::identity_conv_op", lambda ctx, grad: grad)
torch.library.register_autograd("my_ops::identity_conv_object", lambda ctx, grad: (None, grad))
