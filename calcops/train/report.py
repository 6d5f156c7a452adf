"""What a training prints about its frames and its model."""

import itertools

from calcops.train.labels import has_zero_stress

kFewPairs = 100  # fewer pairs of two elements than this are named


def pair_names(model):
    """Return the index (c, t) of each two types, and their names as in Cu-Au."""
    types = range(len(model.type_names))
    return {
        (c, t): f"{model.type_names[c]}-{model.type_names[t]}"
        for c, t in itertools.combinations_with_replacement(types, 2)
    }


def print_frames(images, virials, held_out, model, pairs):
    """Print what the frames to train on hold.

    Args:
        images: the frames.
        virials: their labels [F, 3, 3], NaN where there is none.
        held_out: the number of frames held out.
        model: the model at the start.
        pairs: the Pairs of the frames.
    """
    counts = zip(model.type_names, pairs.most)
    neighbours = ", ".join(f"{name} up to {count}" for name, count in counts)
    print(
        f"{len(images)} frames to train on, {held_out} held out; "
        f"neighbours within {model.cutoff:g} A: {neighbours}"
    )
    labelled = len(images) - virials.isnan().any((1, 2)).sum().item()
    if labelled == 0:
        print("no stress labels")
    elif labelled < len(images):
        print(f"stress labels in {labelled} of {len(images)} frames")
    zeros = sum(map(has_zero_stress, images))
    if zeros:
        print(f"a stress of exactly 0 in {zeros} frames counts as no label")
    few = [
        f"{name} {pairs.counts[index]}"
        for index, name in pair_names(model).items()
        if pairs.counts[index] < kFewPairs
    ]
    if few:
        print(f"warning: few pairs to learn from, within {model.cutoff:g} A: {', '.join(few)}")


def print_overrun(model, pairs):
    """Warn of atoms with more neighbours than the model takes into account.

    Args:
        model: the model. That of a NEP takes all neighbours into account.
        pairs: the Pairs of frames.
    """
    sel = getattr(model, "sel", pairs.most)
    for name, allowed, most, source in zip(model.type_names, sel, pairs.most, pairs.crowded):
        if most > allowed:
            print(
                f"warning: {most} neighbours {name} of an atom in {source}, and sel is {allowed}: "
                "the nearest are kept, so that energies jump and forces are not their derivatives"
            )


def print_model(model):
    """Print the shortest pairs that a model was trained on, and its sel if it has one."""
    lengths = []
    for (c, t), name in pair_names(model).items():
        shortest = model.shortest[c, t].item()
        is_known = 0 < shortest < model.cutoff
        lengths.append(f"{name} {shortest:.3g} A" if is_known else f"{name} none")
    print(f"shortest pairs trained on: {', '.join(lengths)}")
    if not hasattr(model, "sel"):
        return
    rows = ", ".join(f"{name} {count}" for name, count in zip(model.type_names, model.sel))
    print(f"sel, the most neighbours that count: {rows}")


def config_types(images):
    """Return the frames' numbers by their config_type; empty if no frame has one."""
    if not any("config_type" in image.info for image in images):
        return {}
    numbers = {}
    for number, image in enumerate(images):
        numbers.setdefault(str(image.info.get("config_type", "no config_type")), []).append(number)
    return numbers
