"""The one-way street of modules, and what the light half of the package may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import arcface_keras

PACKAGE = Path(arcface_keras.__file__).parent
STREET = """
    _version _checks _fields _on_ray _ranges _cores _scratch _files _memory _progress _native_log _unit_rows
    _exchange cluster
    reference metrics shards embeddings listings held_out gallery heads cleaning losses schedules
    backbones models data recipes config facts run_folder inference features feature_cache training
    training_folds fitting parts train_stage train embed_source embed_shards shard_actor embed_ray embed
    foreign_embeddings neighbors text text_training hashing units postprocess pairs calibrate signals
    run_graphs matching_plan match_shards match evaluate ablation submit ranking new_identity lookup
    evaluate_run report pipeline kernel bundle rehearse cli __main__
""".split()  # noqa: SIM905
NUMPY_ONLY = """
    cluster reference metrics shards embeddings listings held_out gallery data recipes config facts
    run_folder foreign_embeddings neighbors text hashing units postprocess pairs calibrate signals run_graphs
    matching_plan match_shards match evaluate ablation submit ranking new_identity lookup evaluate_run
    report pipeline kernel bundle rehearse cli
""".split()  # noqa: SIM905
HEAVY = {"keras", "tensorflow", "jax", "torch"}


def station(module: str) -> str:
    """'arcface_keras.heads.base' -> 'heads'; the package's own lazy `__init__` -> ''."""
    return module.split(".")[1] if "." in module else ""


def module_files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py")


def imported_modules(source: str, package: str) -> set[str]:
    """Absolute names of all modules imported anywhere in the source, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).rstrip(".")
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def steps_back(name: str, source: str) -> list[str]:
    """Imports of this package's stations that lie to the right of the module's own."""
    own = STREET.index(station(name))
    package = name.rsplit(".", 1)[0]
    stations = {
        station(m)
        for m in imported_modules(source, package)
        if m.startswith("arcface_keras.") and station(m) in STREET
    }
    return sorted(s for s in stations if STREET.index(s) > own)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", module_files(), ids=module_name)
def test_module_imports_only_to_the_left(path: Path) -> None:
    name = module_name(path)
    assert station(name) in STREET, f"{name} has no place on the street: add it to STREET"
    assert steps_back(name, path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from arcface_keras.cli import main",
        "import arcface_keras.evaluate",
        "def f():\n    from arcface_keras import report",
    ],
)
def test_street_check_catches_a_step_back(source: str) -> None:
    assert steps_back("arcface_keras.neighbors.exact", source) != []


def fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOADED = "print(sorted({m.split('.')[0] for m in sys.modules} & {'keras', 'tensorflow', 'jax', 'torch'}))"


@pytest.mark.parametrize(
    "name", [n for n in NUMPY_ONLY if (PACKAGE / n).exists() or (PACKAGE / f"{n}.py").exists()]
)
def test_numpy_half_loads_no_deep_learning_framework(name: str) -> None:
    assert fresh_python(f"import sys, arcface_keras.{name}; {LOADED}") == "[]"


def test_package_import_loads_no_deep_learning_framework() -> None:
    assert fresh_python(f"import sys, arcface_keras; dir(arcface_keras); {LOADED}") == "[]"


def test_framework_check_catches_a_loaded_framework() -> None:
    assert fresh_python(f"import sys, keras; {LOADED}") != "[]"


def test_package_names_are_all_importable() -> None:
    for name in arcface_keras.__all__:
        assert getattr(arcface_keras, name) is not None


def test_unknown_package_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NoSuchHead'"):
        arcface_keras.NoSuchHead  # noqa: B018
