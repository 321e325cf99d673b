"""Marks that property tests share."""

import pytest

# What torch warns of in gradients of rare layouts, and sparsestep in parameters of rare strides.
QUIET = [
    pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
    pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning"),
]
