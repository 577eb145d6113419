"""Writes `kaggle/arcface_layer.py`: the ArcFace layers in one file that needs keras and numpy alone.

    python kaggle/make_arcface_layer.py            # write it
    python kaggle/make_arcface_layer.py --check    # fail if it is not what would be written

From the syntax trees of the package's modules it takes the layers and, over and over, every top-level
definition that a taken one mentions. Imports within the package fall away, because all is in one file then.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "arcface_keras"
TARGET = Path(__file__).with_name("arcface_layer.py")
EXPORTED = ("ArcMarginProduct", "SubCenterArcMarginProduct", "DynamicArcMarginProduct", "Warmup", "Stages")
SERIALIZED_AS = "arcface_layer"

HEADER = '''"""ArcMarginProduct, SubCenterArcMarginProduct and DynamicArcMarginProduct in one file.

GENERATED from arcface_keras {version} by kaggle/make_arcface_layer.py; do not edit. Apache License 2.0.
Paste it into a kernel, or import it as a utility script; it needs Keras 3.8 or newer and numpy, nothing else.

    logits = ArcMarginProduct(n_classes=11014, s=30, m=0.5)([embedding, label])

The layers are those of the package, weight for weight: `.weights.h5` files go both ways. Keras knows these as
`arcface_layer>ArcMarginProduct` and so on, so that the package may be imported beside this file; a whole
`.keras` file loads where the one that it was saved with has been imported.
"""
'''


@dataclass(frozen=True)
class Definition:
    """A top-level statement that binds a name, and what belongs to it."""

    module: str
    text: str
    mentions: frozenset[str]


@dataclass(frozen=True)
class Module:
    """Top-level definitions, names imported from this package and whence, other imports as statements."""

    definitions: dict[str, Definition]
    inside: dict[str, str]
    outside: dict[str, str]


def read_module(name: str, source: str) -> Module:
    """Take a module apart.

    Raises:
        ValueError: an import within the package is relative, of a whole module, of `*` or under another name;
            or a top-level statement is neither import, definition, assignment to one name nor text.
    """
    lines = source.splitlines()
    tree = ast.parse(source)
    definitions: dict[str, Definition] = {}
    inside: dict[str, str] = {}
    outside: dict[str, str] = {}
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                known = alias.asname or alias.name.split(".")[0]
                if not _is_inside(node, alias):
                    outside[known] = ast.unparse(_single(node, alias))
                elif isinstance(node, ast.Import) or node.level or alias.asname or alias.name == "*":
                    raise ValueError(
                        f"{name} must import names of {PACKAGE} as they are, by absolute module. "
                        f"Received: {ast.unparse(node)}."
                    )
                else:
                    inside[known] = str(node.module)
        elif (bound := _bound_name(node)) is not None:
            if bound in definitions:
                raise ValueError(f"{name} must define {bound} once. Received: again in line {node.lineno}.")
            after = tree.body[place + 1] if place + 1 < len(tree.body) else None
            last = after if after and isinstance(node, ast.Assign) and _is_text(after) else node
            text = "\n".join(lines[_first_line(node, lines) - 1 : last.end_lineno])
            definitions[bound] = Definition(name, text, frozenset(_mentions(node)))
        elif not _is_text(node):
            raise ValueError(
                f"{name} must hold imports, definitions, assignments to one name and texts at top level. "
                f"Received: {ast.unparse(node)!r} in line {node.lineno}."
            )
    return Module(definitions, inside, outside)


def collect(names: tuple[str, ...], start: str, root: Path) -> tuple[list[Definition], dict[str, str]]:
    """Return the definitions behind `names` of the module `start`, each after what it needs, and imports.

    Raises:
        ValueError: two definitions of one name that differ; a name that is defined nowhere.
    """
    modules: dict[str, Module] = {}
    taken: dict[str, Definition] = {}
    ordered: list[Definition] = []
    imports: dict[str, str] = {}

    def module(name: str) -> Module:
        if name not in modules:
            path = root.joinpath(*name.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            modules[name] = read_module(name, path.read_text("utf-8"))
        return modules[name]

    def take(name: str, source: str) -> None:
        here = module(source)
        if name in here.inside:
            take(name, here.inside[name])
            return
        definition = here.definitions.get(name)
        if definition is None:
            raise ValueError(f"{name} must be defined in {source}. Received: no such definition.")
        if name in taken:
            if taken[name].text != definition.text:
                raise ValueError(
                    "names must differ in the modules that go into one file. "
                    f"Received: {name} of {taken[name].module} and another of {definition.module}."
                )
            return
        taken[name] = definition
        for mention in sorted(definition.mentions):
            if mention in here.outside:
                text = imports.setdefault(mention, here.outside[mention])
                if text != here.outside[mention]:
                    raise ValueError(f"{mention} must be one import. Received: {text!r} and another one.")
            elif mention != name and (mention in here.inside or mention in here.definitions):
                take(mention, source)
        ordered.append(definition)

    for name in names:
        take(name, start)
    clash = sorted(set(imports) & set(taken))
    if clash:
        raise ValueError(f"definitions and imports must have different names. Received: {', '.join(clash)}.")
    return ordered, imports


def generate() -> str:
    """Return the text of `arcface_layer.py`."""
    ordered, imports = collect(EXPORTED, f"{PACKAGE}.heads", REPOSITORY)
    version = next(iter(read_module("_version", _version_source()).definitions.values())).text
    header = HEADER.format(version=ast.literal_eval(version.split("=")[1].strip()))
    exported = "\n".join(f'    "{name}",' for name in sorted(EXPORTED))
    parts = [f"__all__ = [\n{exported}\n]", *(own_registration(definition.text) for definition in ordered)]
    return f"{header}\n{import_block(imports)}\n\n{join(parts)}"


def own_registration(text: str) -> str:
    """Register the class of a definition under this file's own name."""
    return text.replace(
        f'register_keras_serializable(package="{PACKAGE}")',
        f'register_keras_serializable(package="{SERIALIZED_AS}")',
    )


def import_block(imports: dict[str, str]) -> str:
    """Return sorted imports: the standard library, a blank line, the others."""
    merged: dict[str, set[str]] = {}
    for text in imports.values():
        node = ast.parse(text).body[0]
        if isinstance(node, ast.ImportFrom):
            merged.setdefault(f"from {node.module} import", set()).add(text.split(" import ")[1])
        else:
            merged.setdefault(text, set())
    groups: tuple[list[str], list[str]] = ([], [])
    for start, names in merged.items():
        listed = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        line = f"{start} {', '.join(listed)}" if names else start
        groups[line.split()[1].split(".")[0] not in sys.stdlib_module_names].append(line)
    ordered = [sorted(group, key=lambda line: (line.startswith("from"), line)) for group in groups]
    return "\n\n".join("\n".join(group) for group in ordered if group)


def join(parts: list[str]) -> str:
    """Put definitions together: two blank lines around functions and classes, one between assignments."""
    text = parts[0]
    for before, part in pairwise(parts):
        text += ("\n\n\n" if _is_block(before) or _is_block(part) else "\n\n") + part
    return text + "\n"


def main(arguments: list[str]) -> int:
    text = generate()
    if arguments == ["--check"]:
        same = TARGET.exists() and TARGET.read_text("utf-8") == text
        print(f"{TARGET.name} is {'' if same else 'not '}what {Path(__file__).name} writes")
        return 0 if same else 1
    if arguments:
        print(__doc__)
        return 2
    partial = TARGET.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(TARGET)
    return 0


def _version_source() -> str:
    return (REPOSITORY / PACKAGE / "_version.py").read_text("utf-8")


def _is_inside(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> bool:
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
    return module.split(".")[0] == PACKAGE or bool(getattr(node, "level", 0))


def _single(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.Import | ast.ImportFrom:
    if isinstance(node, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(node.module, [alias], node.level)


def _bound_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _is_text(node: ast.stmt | None) -> bool:
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def _is_block(text: str) -> bool:
    first = next(line for line in text.splitlines() if not line.startswith("#"))
    return first.startswith(("def ", "class ", "@"))


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    """The line of the first decorator, or of the comments directly above."""
    first: int = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return first


def _mentions(node: ast.stmt) -> Iterator[str]:
    """Names that a statement reads, also in annotations that are texts."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.arg | ast.FunctionDef):
            annotation = child.annotation if isinstance(child, ast.arg) else child.returns
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                yield from (n.id for n in ast.walk(ast.parse(annotation.value)) if isinstance(n, ast.Name))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
