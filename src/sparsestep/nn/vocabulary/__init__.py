"""Dynamic vocabularies: ids of any value to the rows of a table."""

from sparsestep.nn.vocabulary.vocabulary import Vocabulary

__all__ = ["Vocabulary"]
