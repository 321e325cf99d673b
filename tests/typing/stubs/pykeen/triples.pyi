import numpy as np
from numpy.typing import NDArray

class TriplesFactory:
    @classmethod
    def from_labeled_triples(cls, triples: NDArray[np.str_]) -> TriplesFactory: ...
