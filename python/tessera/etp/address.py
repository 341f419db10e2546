"""Addresses that `data_ptr()` of a parameter or gradient returns: they can be compared, and nothing else.

Most programs that ask a tensor for its address want to know whether two tensors share memory (tied weights), and for
that a sharded tensor has an answer. Those that read or write there would see a part of it, so that the number itself
is refused, where it is asked for.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from .._errors import InvalidArgumentError
from .store import Store

_NUMBER = (
    "int index float lt le gt ge add radd sub rsub mul rmul mod rmod floordiv rfloordiv divmod and rand or ror xor "
    "rxor lshift rshift neg invert format"
)


class Address:
    """The address of a sharded tensor. Two are equal if the tensors begin at the same element of the same memory; none
    is equal to that of a plain tensor. Its number is refused by name."""

    __slots__ = ("_begin", "_refusal", "_store")

    def __init__(self, store: Store, begin: int, refusal: InvalidArgumentError) -> None:
        self._store = weakref.ref(store)
        self._begin = begin  # elements into the memory
        self._refusal = refusal

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and (self._store, self._begin) == (other._store, other._begin)

    def __hash__(self) -> int:
        return hash((self._store, self._begin))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<address of a sharded tensor: {self._refusal}>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise self._refusal

    @property
    def _as_parameter_(self) -> NoReturn:  # ctypes asks for it
        raise self._refusal


for _name in _NUMBER.split():
    setattr(Address, f"__{_name}__", Address._refuse)
