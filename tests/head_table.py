"""One table of constructor arguments for the contract suites: a new head is one line here."""

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
}


def make_head(name, n_classes=5, **options):
    """Build the head of that name in HEADS for `n_classes` classes."""
    from arcface_keras.heads import HEADS

    arguments = {**HEAD_ARGUMENTS[name], **options}
    if name == "dynamic":
        return HEADS[name]([2 * i + 1 for i in range(n_classes)], **arguments)
    return HEADS[name](n_classes, **arguments)
