"""Groups of options that several commands share, each declared once as a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a typer command of a function whose parameters may be whole groups of options.

    A parameter that is annotated with a dataclass becomes one option for each of its fields, which are annotated as
    typer's parameters are (``Annotated[int, typer.Option(...)]``); the function gets the dataclass.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    parameters: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters.extend(_parameters(groups[name]))
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    # typer reads both; without them it would follow __wrapped__ to the function with the groups.
    del run.__wrapped__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name])


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
