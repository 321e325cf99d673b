"""One function per rule: param, gradient, state tensors, options. In place, and nothing hidden.

The gradient may have any layout: strided, COO, CSR, CSC, BSR, BSC, a ``MaskedTensor`` or a
``Touched``. State tensors come in torch's order and under torch's names and are written in place;
``step`` is the number of the update, from 1. Everything is checked before anything is written.
Autograd is not involved, so the functions may be called inside anybody's ``torch.no_grad`` code.
"""

from sparsestep.functional.adagrad import adagrad_, ftrl_, rowwise_adagrad_
from sparsestep.functional.adam import adam_, adamw_, radam_, rowwise_adam_, sparse_adam_
from sparsestep.functional.apply import apply_
from sparsestep.functional.momentum import lion_, rmsprop_, sgd_

__all__ = [
    "adagrad_",
    "adam_",
    "adamw_",
    "apply_",
    "ftrl_",
    "lion_",
    "radam_",
    "rmsprop_",
    "rowwise_adagrad_",
    "rowwise_adam_",
    "sgd_",
    "sparse_adam_",
]
