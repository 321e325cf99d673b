"""What one release of torch does and another does not, in one place, with the reasons.

A test that a release cannot pass is marked with a condition from here. So is a warning that torch
itself causes; elsewhere warnings are errors.
"""

from __future__ import annotations

import pytest
import torch

# Up to 2.13, DistributedOptimizer compiles the optimizer that it finds into TorchScript, and what
# it raises comes back as a RuntimeError. From 2.14 on it calls it from Python.
COMPILES_DISTRIBUTED_OPTIMIZERS = torch.__version__ < (2, 14)

# Over gloo, fully_shard gives parameters the sum of the processes' gradients in 2.7, where the mean
# is meant; in 2.10 it is the mean.
SUMS_SHARDED_GRADIENTS = torch.__version__ < (2, 10)

# Torch says this of its own, wherever TorchScript is used: a DeprecationWarning up to 2.13, a
# FutureWarning from 2.14 on.
uses_torchscript = pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.\w+` is (deprecated|not supported)::torch\.jit"
)

needs_gradients_that_autograd_lets_go = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="autograd holds the gradient during backward here (seen in 2.7 and 2.10), so that "
    "it may be shared, and it is copied",
)

needs_means_over_gloo = pytest.mark.skipif(
    torch.__version__ < (2, 10),
    reason="fully_shard asks gloo for a mean here, which gloo does not have (seen in 2.7)",
)

needs_tensors_that_the_core_reads = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="torch has no table for C code to read its tensors with (2.7 does not, 2.10 does), so "
    "no step is a single call of the core",
)

# Of what is compiled by AOTAutograd, inductor too. Python numbers are then part of the graph.
needs_graphs_for_any_number = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch.compile makes a graph for every value of lr here (seen in 2.7 and 2.10), and "
    "gives up after eight",
)

# torch.load(weights_only=True) since 2.15.
loads_sparse_tensors = pytest.mark.filterwarnings(
    r"ignore:Validating sparse tensor invariants:UserWarning:torch\.serialization"
)

# SequentialLR calls its schedulers in a way that it has deprecated itself (seen in 2.7).
steps_sequential_schedulers = pytest.mark.filterwarnings(
    r"ignore:The epoch parameter in `scheduler\.step\(\)`:UserWarning:torch\.optim\.lr_scheduler"
)

# torch.compile says that it leaves torch.Generator out of the graph (seen in 2.7 and 2.10).
compiles_generators = pytest.mark.filterwarnings(
    r"ignore:Dynamo does not know how to trace the builtin .*Generator:UserWarning"
)

needs_lookups_in_graphs = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="lookups stay outside of graphs of torch.compile here",
)
