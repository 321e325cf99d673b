"""Libraries that list the subclasses of torch's Optimizer, such as class_resolver, skip ours."""

from collections.abc import Iterator

from torch.optim import Optimizer

import sparsestep  # noqa: F401


def package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def resolved(cls: type) -> Iterator[type]:
    """What ``class_resolver.utils.get_subclasses`` finds: classes of the package of their base."""
    for below in cls.__subclasses__():
        yield from resolved(below)
        names = (below.__name__, *below.__module__.split("."))
        private = any(name.startswith("_") for name in names)
        if not private and package(below) == package(cls):
            yield below


def test_none_of_ours_is_taken_for_one_of_torchs():
    found = list(resolved(Optimizer))
    assert not [cls for cls in found if package(cls) == "sparsestep"]
    assert sum(cls.__name__ == "Adam" for cls in found) == 1
