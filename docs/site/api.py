"""One page for each package of grpo that users call or extend, in Markdown, from signatures and docstrings.

griffe reads the source without importing it: neither torch nor anything else of grpo's needs to be installed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import griffe

PACKAGES = (
    "algorithms",
    "rewards",
    "scoring",
    "rl",
    "training",
    "generation",
    "sampling",
    "judging",
    "data",
    "config",
    "health",
    "model",
    "sandbox",
)
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def write_api(root: Path, add: Callable[[str, str], None]) -> list[tuple[str, str]]:
    """Adds the pages as (path, text). Returns title and path of each."""
    grpo = griffe.load("grpo", search_paths=[root])
    entries = []
    for name in PACKAGES:
        path = f"api/{name}.md"
        add(path, "\n".join(_page(grpo[name], root)))
        entries.append((f"grpo.{name}", path))
    return entries


def _page(package: griffe.Module, root: Path) -> Iterator[str]:
    yield f"# {package.path}\n"
    yield f"{_text(package)}\n"
    for module in _modules(package):
        members = [text for member in _public(module) for text in _member(member)]
        if members:
            name = module.path.removeprefix(f"{package.path}.")
            yield f"## {name}\n\n{_text(module)}\n\n`{module.filepath.relative_to(root)}`\n"
            yield f":::{{py:module}} {module.path}\n:::\n"
            yield from members


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """The modules of a package, those of its own packages last."""
    for module in sorted(package.modules.values(), key=lambda module: (module.is_package, module.name)):
        if module.is_package:
            yield from _modules(module)
        else:
            yield module


def _public(scope: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    """What a reader may use: defined here, without a leading underscore, with a docstring."""
    for name, member in scope.members.items():
        if not member.is_alias and not name.startswith("_") and member.has_docstring:
            yield member


def _member(member: griffe.Object) -> Iterator[str]:
    if isinstance(member, griffe.Function):
        yield _block("function", member.signature(), _text(member))
    elif isinstance(member, griffe.Attribute):
        yield _block("data", _typed(member), _text(member))
    elif isinstance(member, griffe.Class):
        fields = "\n".join(_fields(member))
        methods = [
            _block(_method_kind(method), method.signature(), _text(method))
            for method in _public(member)
            if isinstance(method, griffe.Function)
        ]
        yield _block("class", _class_signature(member), "\n\n".join([_text(member), fields, *methods]), colons=5)


def _block(kind: str, signature: str, text: str, colons: int = 4) -> str:
    # A signature is one line: Sphinx takes a second one for another object.
    return f"{':' * colons}{{py:{kind}}} {' '.join(signature.split())}\n\n{text}\n{':' * colons}\n"


def _method_kind(method: griffe.Function) -> str:
    return next((kind for kind in ("classmethod", "staticmethod") if kind in method.labels), "method")


def _class_signature(found: griffe.Class) -> str:
    if _is_settings(found) or not ((found.parameters and "dataclass" in found.labels) or "__init__" in found.members):
        return found.name
    shown = [
        f"{'*' * _stars(parameter)}{parameter.name}"
        + (f": {parameter.annotation}" if parameter.annotation else "")
        + (f" = {_short(str(parameter.default))}" if parameter.default and not _stars(parameter) else "")
        for parameter in found.parameters
        if parameter.name != "self"
    ]
    return f"{found.name}({', '.join(shown)})"


def _stars(parameter: griffe.Parameter) -> int:
    kinds = {griffe.ParameterKind.var_positional: 1, griffe.ParameterKind.var_keyword: 2}
    return kinds.get(parameter.kind, 0)


def _short(default: str) -> str:
    return "..." if len(default) > 30 else default


def _is_settings(found: griffe.Class) -> bool:
    """Whether its fields are those of a pydantic model."""
    return any("Field(" in str(attribute.value) for attribute in found.attributes.values())


def _fields(found: griffe.Class) -> Iterator[str]:
    """A line for each field that says what it means, and for each of a NamedTuple."""
    every = _is_settings(found) or "NamedTuple" in map(str, found.bases)
    for name, attribute in found.attributes.items():
        if name.startswith("_") or name == "model_config" or not (every or attribute.has_docstring):
            continue
        default, description = _field(str(attribute.value)) if attribute.value else ("", "")
        text = " ".join(part for part in (description, _text(attribute).replace("\n", " ")) if part)
        yield f"- `{name}: {attribute.annotation}{f' = {default}' if default else ''}`" + (f": {text}" if text else "")


def _field(value: str) -> tuple[str, str]:
    """The default of a field and what its `Field(...)` says of it."""
    call = ast.parse(value, mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Field"):
        return _short(value), ""
    said = {keyword.arg: keyword.value for keyword in call.keywords}
    default = ast.unparse(call.args[0]) if call.args else ast.unparse(said["default"]) if "default" in said else ""
    bounds = [f"{words} {ast.unparse(said[name])}" for name, words in BOUNDS.items() if name in said]
    described = said.get("description")
    text = str(ast.literal_eval(described)) if isinstance(described, ast.Constant) else ""
    return _short(default), " ".join(
        part for part in (text, f"{', '.join(bounds).capitalize()}." if bounds else "") if part
    )


def _typed(attribute: griffe.Attribute) -> str:
    return attribute.name + (f": {attribute.annotation}" if attribute.annotation else "")


def _text(described: griffe.Object) -> str:
    return described.docstring.value.strip() if described.docstring else ""
