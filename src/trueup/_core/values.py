"""Immutable objects that are fully described by their constructor's arguments.

`config()` returns these, and files store them.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from trueup._core.arrays import to_array
from trueup._core.namespace import Namespace

Leaf = Callable[[str, Any], Any]
"""A function of a parameter's path, such as "steps.0.temperature", and the parameter, which is an array or a number."""


class Frozen(ABCMeta):
    """Metaclass of classes whose objects cannot be changed after their constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an object and freeze it."""
        value = super().__call__(*args, **kwargs)
        object.__setattr__(value, "_sealed", True)
        return value

    @property
    def __signature__(cls) -> inspect.Signature:
        """Return the constructor's signature."""
        constructor = inspect.signature(cls.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])


class Value(metaclass=Frozen):
    """A frozen object that keeps its constructor's arguments as attributes of the same names.

    >>> class Scale(Value):
    ...     def __init__(self, factor):
    ...         self.set_parameters(factor=factor)
    >>> Scale(2.5), Scale([1, 2]).config()
    (Scale(factor=2.5), {'factor': array([1., 2.])})
    """

    _parameter_names: tuple[str, ...] = ()
    _sealed: bool = False

    def set_parameters(self, **parameters: Any) -> None:
        """Store parameters by name, in the constructor, each as a read-only float64 array or one Python float."""
        for name, value in parameters.items():
            array = np.array(to_array(value, name), dtype=np.float64)
            array.flags.writeable = False
            setattr(self, name, float(array) if array.ndim == 0 else array)
        self._parameter_names = (*self._parameter_names, *parameters)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments: `type(c)(**c.config())` equals `c`."""
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: getattr(self, p.name) for p in parameters if p.kind is named}

    def bind(self, xp: Namespace, like: Any) -> Self:
        """Return a copy with arrays of another package, on the device of `like`; for NumPy, the object itself."""
        if xp.is_numpy:
            return self
        return map_parameters(self, lambda _, x: xp.constant(x, like) if isinstance(x, np.ndarray) else x)

    def _replace(self, **attributes: Any) -> Self:
        """Return a copy with other attributes."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, **attributes)
        return copied

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
    """Return a copy of a value with each parameter x replaced by `leaf(path, x)`, in nested values too."""

    def replace(name: Any, part: Any, is_parameter: bool = False) -> Any:
        inner_path = f"{path}.{name}" if path else str(name)
        return leaf(inner_path, part) if is_parameter else map_parameters(part, leaf, inner_path)

    if isinstance(type(value), Frozen):
        parts = {name: replace(name, part, name in value._parameter_names) for name, part in vars(value).items()}
        return value._replace(**parts)
    if type(value) in (tuple, list):
        return type(value)(replace(number, part) for number, part in enumerate(value))
    if type(value) is dict:
        return {key: replace(key, part) for key, part in value.items()}
    return leaf(path, value) if isinstance(value, np.ndarray) else value


def parameters(value: Any) -> dict[str, Any]:
    """Return the parameters of a value and of the values inside it, arrays and numbers, by path.

    >>> class Scale(Value):
    ...     def __init__(self, factor):
    ...         self.set_parameters(factor=factor)
    >>> parameters(Scale(2.0))
    {'factor': 2.0}
    """
    known: dict[str, Any] = {}
    map_parameters(value, known.setdefault)
    return known


def _brief(value: Any) -> str:
    """Format small parameters in full and large ones by their shape."""
    if isinstance(value, np.ndarray):
        return f"array{value.shape}"
    return f"{value:.6g}" if type(value) is float else repr(value)
