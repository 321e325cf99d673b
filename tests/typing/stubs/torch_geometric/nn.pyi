from torch import Tensor, nn
from torch.utils.data import DataLoader

class Node2Vec(nn.Module):
    def __init__(
        self,
        edge_index: Tensor,
        *,
        embedding_dim: int,
        walk_length: int,
        context_size: int,
        walks_per_node: int,
        num_nodes: int,
        sparse: bool,
    ) -> None: ...
    def __call__(self, batch: Tensor | None = None) -> Tensor: ...
    def loader(self, *, batch_size: int, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]: ...
    def loss(self, pos_rw: Tensor, neg_rw: Tensor) -> Tensor: ...
