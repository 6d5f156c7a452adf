"""Runs a package in Python.

    python run_inference.py model.pt2 identity_conv_ops.so

It prints, on cpu or cuda:
model.pt2 on cpu: [1, 3, 224, 224] identical, [2, 3, 224, 224] identical, ...
"""

import logging
import sys

import torch

# A machine may have a CUDA toolkit and no GPU; PyTorch's compilers warn of that.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: "No CUDA runtime" not in record.getMessage()
)
# portable.pt2 was made for other processors than this one on purpose.
logging.getLogger("torch.export.pt2_archive._package").addFilter(
    lambda record: "AOTI_CPU_ISA" not in record.args
)

package, library = sys.argv[1:]
# Before the package, which holds an object of a class in it; its fake is not needed.
torch.ops.load_library(library)
model = torch._inductor.aoti_load_package(package)
device = model.loader.get_metadata()["AOTI_DEVICE_KEY"]
results = []
for batch in (1, 2, 5):
    x = torch.rand(batch, 3, 224, 224, device=device)
    y = model(x)
    if not torch.equal(x, y):
        sys.exit(f"batch of {batch}: not what went in")
    results.append(f"{list(y.shape)} identical")
print(f"{package} on {device}: {', '.join(results)}")
