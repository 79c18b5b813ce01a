"""What is closed at the end of a ``with`` block: one home for the two methods that this takes."""

from abc import ABC, abstractmethod
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """A context manager whose end is :meth:`close`."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
