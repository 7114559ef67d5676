"""Frozen values that are made of their parameters: what a constructor takes is what `config` gives and a file holds."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from trueup._core.arrays import to_array
from trueup._core.namespace import Namespace

Leaf = Callable[[str, Any], Any]
"""A function of a parameter's path, such as "steps.0.temperature", and the parameter: an array or a number."""


class Frozen(ABCMeta):
    """The type of classes whose objects cannot be changed once their constructor is done."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an object and seal it."""
        made = super().__call__(*args, **kwargs)
        object.__setattr__(made, "_sealed", True)
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor."""
        constructor = inspect.signature(cls.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])


class Value(metaclass=Frozen):
    """A frozen object whose constructor takes its parameters, by the names under which it keeps them.

    >>> class Scale(Value):
    ...     def __init__(self, factor):
    ...         self.set_parameter("factor", factor)
    >>> Scale(2.5), Scale([1, 2]).config()
    (Scale(factor=2.5), {'factor': array([1., 2.])})
    """

    _parameter_names: tuple[str, ...] = ()
    _sealed: bool = False

    def set_parameter(self, name: str, value: Any) -> None:
        """Store a parameter, in the constructor: a float64 array that cannot be written to, or one Python float."""
        array = np.array(to_array(value, name), dtype=np.float64)
        array.flags.writeable = False
        setattr(self, name, float(array) if array.ndim == 0 else array)
        self._parameter_names = (*self._parameter_names, name)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: `type(c)(**c.config())` equals `c`."""
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: getattr(self, p.name) for p in parameters if p.kind is named}

    def bind(self, xp: Namespace, like: Any) -> Self:
        """A copy whose arrays are of another package, on the device of `like`; itself for NumPy."""
        if xp.is_numpy:
            return self
        return map_parameters(self, lambda _, x: xp.constant(x, like) if isinstance(x, np.ndarray) else x)

    def _replace(self, **attributes: Any) -> Self:
        """A copy with other attributes."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **attributes)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed:
            raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set; make a new one")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in state.get("_parameter_names", ()):
            if isinstance(state[name], np.ndarray):
                state[name].flags.writeable = False
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(x)}' for name, x in self.config().items())})"


def map_parameters(value: Any, leaf: Leaf, path: str = "") -> Any:
    """A copy of a value in which `leaf(path, x)` takes the place of each parameter x, in nested values too."""

    def inside(name: Any, part: Any, is_parameter: bool = False) -> Any:
        below = f"{path}.{name}" if path else str(name)
        return leaf(below, part) if is_parameter else map_parameters(part, leaf, below)

    if isinstance(type(value), Frozen):
        parts = {name: inside(name, part, name in value._parameter_names) for name, part in vars(value).items()}
        return value._replace(**parts)
    if type(value) in (tuple, list):
        return type(value)(inside(number, part) for number, part in enumerate(value))
    if type(value) is dict:
        return {key: inside(key, part) for key, part in value.items()}
    return leaf(path, value) if isinstance(value, np.ndarray) else value


def parameters(value: Any) -> dict[str, Any]:
    """The parameters of a value and of the values in it, by their paths: arrays and numbers.

    >>> class Scale(Value):
    ...     def __init__(self, factor):
    ...         self.set_parameter("factor", factor)
    >>> parameters(Scale(2.0))
    {'factor': 2.0}
    """
    known: dict[str, Any] = {}
    map_parameters(value, known.setdefault)
    return known


def _brief(value: Any) -> str:
    """Small parameters in full, large ones by their shape."""
    if isinstance(value, np.ndarray):
        return f"array{value.shape}"
    return f"{value:.6g}" if type(value) is float else repr(value)
