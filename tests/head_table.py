"""One table of constructor arguments for the contract suites: a new head is one line here."""

import keras
import pytest

HEAD_ARGUMENTS = {
    "arc": {},
    "add": {},
    "combined": {"m1": 1.2, "m2": 0.3, "m3": 0.1},
    "softmax": {},
    "subcenter": {"sub_centers": 2},
    "dynamic": {"s": 30.0, "sub_centers": 1},
    "mv_arc": {},
    "mv_add": {},
    "curricular": {},
    "adacos": {},
    "adaface": {"initial_mean": 2.0, "initial_std": 1.0},
    "magface": {"l_a": 1.0, "u_a": 3.0, "easy_margin": False},
    "elastic_arc": {"seed": 0},
    "elastic_cos": {"seed": 0, "plus": True},
    "sphereface2": {},
    "li_arc": {},
}


def make_head(name, n_classes=5, **options):
    """Build the head of that name in HEADS for `n_classes` classes."""
    from arcface_keras.heads import HEADS

    arguments = {**HEAD_ARGUMENTS[name], **options}
    if name == "dynamic":
        return HEADS[name]([2 * i + 1 for i in range(n_classes)], **arguments)
    return HEADS[name](n_classes, **arguments)


def need_float64():
    """Skip the test where the backend computes float64 in float32 (JAX without JAX_ENABLE_X64=1)."""
    if keras.backend.backend() == "jax":
        import jax

        if not jax.config.jax_enable_x64:
            pytest.skip("needs JAX_ENABLE_X64=1")
