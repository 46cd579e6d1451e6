"""Changes one expression of a function of the product, to see whether the tests notice."""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from types import ModuleType

import pytest


def rewrite(monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, name: str, *changes: tuple[str, str]) -> None:
    """Replaces `owner.name` by the same function with changes: (code as `ast.unparse` writes it, code instead).

    Every old code must occur exactly once: a mutation whose line is gone would otherwise test nothing for ever.
    """
    function = inspect.unwrap(getattr(owner, name))
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has no single {old!r} (any more):\n{source}"
        source = source.replace(old, new)
    code = compile(source, f"<mutated {name}>", "exec", flags=__future__.annotations.compiler_flag)
    namespace: dict[str, object] = {}
    exec(code, function.__globals__, namespace)  # noqa: S102 (the product's own source)
    monkeypatch.setattr(owner, name, namespace[name])
