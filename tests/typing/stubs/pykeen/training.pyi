from pykeen.models import Model
from pykeen.triples import TriplesFactory
from torch.optim import Optimizer

class SLCWATrainingLoop:
    def __init__(
        self, *, model: Model, triples_factory: TriplesFactory, optimizer: Optimizer
    ) -> None: ...
    def train(
        self,
        triples_factory: TriplesFactory,
        *,
        num_epochs: int,
        batch_size: int,
        use_tqdm: bool,
        continue_training: bool = ...,
    ) -> list[float] | None: ...
