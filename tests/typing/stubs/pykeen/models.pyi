from pykeen.triples import TriplesFactory
from torch import nn

class Model(nn.Module): ...

class ComplEx(Model):
    def __init__(
        self, *, triples_factory: TriplesFactory, embedding_dim: int, random_seed: int
    ) -> None: ...
