"""Train a Deep Potential or a NEP on your own frames.

    calcops train frames.extxyz more.traj deepmd/data --folder water
    calcops train frames.extxyz --model nep
    calcops train frames.extxyz --settings settings.toml --steps 100000
    torchrun --nproc-per-node 2 -m calcops train frames.extxyz --batch 4

Frames are DeePMD-kit's folders, or files that ASE reads, with energy (eV), forces (eV/A) and
optionally stress (eV/A^3). To resume from the checkpoint, give the same command again. The results
in --folder, `trained/water` for water.extxyz, are

    checkpoint.pt   the last state     log.csv      errors every --every steps
    model.npz       the model          loss.png     errors of the training batches
    model.pt2       its package        parity.png   predictions over labels: --test, or held out

With --model nep, the model is nep.txt, which GPUMD and NEP_CPU read, too.

settings.toml has the options below as keys, with _ for -. Command-line options take precedence.
"""

import argparse
import os
import tomllib
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from calcops.deepmd.deep_potential import DeepPotential
from calcops.nep.nep_file import check_limits
from calcops.train import report
from calcops.train.datasets import frames_of, is_lone_atom, read
from calcops.train.first_model import first_model, pairs_of
from calcops.train.labels import weights_in_words
from calcops.train.loop import Run, identity_of, locked, option
from calcops.train.nep_parameters import TrainedNep
from calcops.train.trainer import Data, Trainer, kBatch, kRates, kRatesOfStart
from torch import distributed

# The options of the model of a training without --start, by --model. Those that are None follow
# from others: sel is counted, smooth is 0.7 of the cutoff, and the angular cutoff is the cutoff.
kModels = {
    "deep-potential": {
        "cutoff": 5.0,
        "smooth": None,
        "sel": None,
        "embedding": [24, 24],
        "axis": 12,
        "fitting": [48, 48],
    },
    "nep": {
        "cutoff": 5.0,
        "angular_cutoff": None,
        "n_max": [8, 6],
        "basis_size": [8, 8],
        "l_max": [4, 0, 0],
        "neurons": 40,
    },
}


def arguments():
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="calcops train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("frames", nargs="*", help="files that ASE reads, or DeePMD-kit's folders")
    add("--settings", type=Path, help="a TOML file")
    add("--folder", type=Path, help="for the results; default: trained/NAME of the frames")
    add(
        "--start",
        type=Path,
        help="fine-tune this model: .npz, DeePMD-kit's .pth, .pt, .dp, or nep.txt",
    )

    add = parser.add_argument_group("the frames").add_argument
    add(
        "--held-out",
        type=float,
        default=0.1,
        help="share of the frames to hold out of the training",
    )
    add("--validate", nargs="+", default=[], help="frames to hold out instead of a share")
    add("--test", nargs="+", default=[], help="frames for the errors of the finished model")
    for label, unit in (("energy", "eV"), ("forces", "eV/A"), ("stress", "eV/A^3")):
        add(f"--{label}-key", help=f"name of the {label} ({unit}) in the files; default: ASE's")
    add("--virial-key", help="name of the virial (eV), instead of the stress")

    add = parser.add_argument_group("the model, unless --start gives it").add_argument
    add("--model", choices=kModels, help="default: deep-potential; with --start nep.txt: nep")
    add("--cutoff", type=float, help="A; default: 5")

    add = parser.add_argument_group("a Deep Potential, unless --start gives it").add_argument
    add("--smooth", type=float, help="A, where the cutoff begins; default: 0.7 of the cutoff")
    add(
        "--sel",
        type=int,
        nargs="+",
        help="maximum number of neighbours, by element; default: counted, with a margin",
    )
    add("--embedding", type=int, nargs="+", help="widths of the embedding nets; default: 24 24")
    add("--axis", type=int, help="columns of the descriptor's second factor; default: 12")
    add("--fitting", type=int, nargs="+", help="widths of the fitting nets; default: 48 48")

    add = parser.add_argument_group("a NEP, unless --start gives it").add_argument
    add("--angular-cutoff", type=float, help="A; default: the cutoff")
    add(
        "--n-max",
        type=int,
        nargs=2,
        help="radial functions minus 1, in the radial and the angular part; default: 8 6",
    )
    add("--basis-size", type=int, nargs=2, help="functions of their basis minus 1; default: 8 8")
    add(
        "--l-max",
        type=int,
        nargs=3,
        help="largest l of the three-body part, 2 for q_222 or 0, 1 for q_1111 or 0; "
        "default: 4 0 0",
    )
    add("--neurons", type=int, help="in each element's net; default: 40")

    add = parser.add_argument_group("the training").add_argument
    add("--steps", type=int, default=40000, help="default: 40000")
    add(
        "--batch",
        type=int,
        default=kBatch,
        help=f"the least number of atoms in the frames of a step; default: {kBatch}",
    )
    add(
        "--rates",
        type=float,
        nargs=2,
        help="learning rates at the first and the last step; default: 1e-2 0, with --start 1e-3 0",
    )
    add(
        "--weights",
        type=float,
        nargs=3,
        metavar=("E", "F", "V"),
        help="weights of squared errors of energy/atom (eV), force (eV/A), virial/atom (eV); "
        "default: by how much the labels vary",
    )
    add("--every", type=int, default=1000, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each process")
    add(
        "--tabulated",
        action="store_true",
        help="in the package, replace embedding nets with splines or tables",
    )
    add("--float32-nets", action="store_true", help="in the package, compute nets in float32")
    return parser


def parse(words):
    """Return the options of a command.

    Raises:
        ValueError: the settings file or an option is wrong.
    """
    parser = arguments()
    options = parser.parse_args(words)
    if options.settings:
        parser.set_defaults(**settings_of(options.settings, parser))
        options = parser.parse_args(words)
    set_model(options)
    if options.rates is None:
        options.rates = kRatesOfStart if options.start else kRates
    check(options)
    if options.folder is None:
        frames = Path(options.frames[0]).resolve()
        options.folder = Path("trained", frames.name if frames.is_dir() else frames.stem)
    best = TrainedNep if options.model == "nep" else DeepPotential
    if options.start and options.start.resolve() == (options.folder / best.file_name).resolve():
        raise ValueError(f"expected another --folder than that of --start, got {options.folder}")
    return options


def settings_of(path, parser):
    """Return the settings of a file, as the parser returns the same options of a command.

    Raises:
        ValueError: the file cannot be read, or a name or a value is wrong.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    names = vars(parser.parse_args([])).keys() - {"settings"}
    unknown = sorted(settings.keys() - names)
    if unknown:
        raise ValueError(f"{path}: expected options, got {', '.join(unknown)}")
    parser.exit_on_error = False
    try:
        return {name: setting_of(name, value, parser) for name, value in settings.items()}
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    finally:
        parser.exit_on_error = True


def setting_of(name, value, parser):
    """Return the value of a setting as the parser returns that of the option.

    Raises:
        argparse.ArgumentError, ValueError: the option does not take the value.
    """
    default = parser.get_default(name)
    if default is False and not isinstance(value, bool):
        raise ValueError(f"expected {name} of true or false, got {value!r}")
    if default is False or value == default:
        return value
    values = [str(number) for number in (value if isinstance(value, list) else [value])]
    if name == "frames":
        return values
    options = parser.parse_args([option(name), *values])
    if options.frames:  # the values that the option leaves
        raise ValueError(f"expected fewer values of {name}, got {value}")
    return getattr(options, name)


def set_model(options):
    """Give the options of the model that are absent their values.

    Raises:
        ValueError: such an option is of another model, or --start gives the model.
    """
    set_kind(options)
    own = kModels[options.model]
    names = dict.fromkeys(name for model in kModels.values() for name in model)
    given = [name for name in names if getattr(options, name) is not None]
    if options.start and given:
        words = " or ".join(map(option, given))
        raise ValueError(f"expected no {words} with --start, which gives the model")
    others = [name for name in given if name not in own]
    if options.model == "nep":
        others += [name for name in ("tabulated", "float32_nets") if getattr(options, name)]
    if others:
        words = " or ".join(map(option, others))
        raise ValueError(f"expected no {words} with --model {options.model}")
    for name, value in own.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.smooth is None:
        options.smooth = 0.7 * options.cutoff
    if options.angular_cutoff is None:
        options.angular_cutoff = options.cutoff


def set_kind(options):
    """Set the kind of the model, if the options have none: that of --start.

    Raises:
        ValueError: there is no such kind, or --start is of another one.
    """
    is_nep = options.start is not None and options.start.suffix == ".txt"
    if options.model is None:
        options.model = "nep" if is_nep else "deep-potential"
    if options.model not in kModels:  # from a settings file
        raise ValueError(f"expected --model {' or '.join(kModels)}, got {options.model}")
    if options.start and is_nep != (options.model == "nep"):
        kind = "a nep.txt" if options.model == "nep" else "a Deep Potential"
        raise ValueError(
            f"expected {kind} of --start with --model {options.model}, got {options.start}"
        )


def check(options):
    """Raise ValueError if an option is missing or wrong."""
    if not options.frames:
        raise ValueError("expected frames: files that ASE reads, or folders of DeePMD-kit")
    sizes = ["steps", "batch", "every"]
    if not options.start:
        sizes += ["cutoff", "neurons"] if options.model == "nep" else ["cutoff", "axis", "smooth"]
    for name in sizes:
        if not getattr(options, name) > 0:
            raise ValueError(f"expected --{name} > 0, got {getattr(options, name)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("expected a GPU for --device cuda, got none")
    check_rates(options)
    if not 0 < options.held_out < 1:
        raise ValueError(f"expected --held-out between 0 and 1, got {options.held_out:g}")
    if options.stress_key and options.virial_key:
        raise ValueError("expected --stress-key or --virial-key, got both")
    if not options.start:
        if np.isinf(options.cutoff):
            raise ValueError("expected a finite --cutoff, got inf")
        checks = {"nep": check_nep, "deep-potential": check_deep_potential}
        checks[options.model](options)


def check_rates(options):
    """Raise ValueError if the rates, the weights of the loss or the seed are wrong."""
    for name in ("rates", "weights"):
        numbers = getattr(options, name)
        if numbers and not (np.isfinite(numbers).all() and min(numbers) >= 0 and max(numbers) > 0):
            raise ValueError(
                f"expected {option(name)} from 0 on, not all of them 0, got {list(numbers)}"
            )
    if options.seed < 0:
        raise ValueError(f"expected --seed from 0 on, got {options.seed}")


def check_deep_potential(options):
    """Raise ValueError if an option of a Deep Potential is wrong."""
    if not options.smooth < options.cutoff:
        raise ValueError(f"expected --smooth < {options.cutoff:g}, got {options.smooth:g}")
    for name in ("embedding", "fitting"):
        if min(getattr(options, name)) < 1:
            raise ValueError(f"expected {option(name)} > 0, got {getattr(options, name)}")
    if options.axis > options.embedding[-1]:
        raise ValueError(
            f"expected --axis of at most {options.embedding[-1]}, the last width of --embedding, "
            f"got {options.axis}"
        )


def check_nep(options):
    """Raise ValueError if an option of a NEP is wrong."""
    if not 0 < options.angular_cutoff <= options.cutoff:
        raise ValueError(
            f"expected 0 < --angular-cutoff <= {options.cutoff:g}, got {options.angular_cutoff:g}"
        )
    for name in ("n_max", "basis_size"):
        sizes = getattr(options, name)
        if len(sizes) != 2 or min(sizes) < 0:
            raise ValueError(f"expected {option(name)} of two numbers from 0 on, got {sizes}")
    check_limits(options.neurons, options.n_max, options.basis_size)
    numbers = options.l_max
    if len(numbers) != 3 or not 1 <= numbers[0] <= 4:
        raise ValueError(f"expected --l-max from 1 to 4 and two flags, got {numbers}")
    if numbers[1] not in (0, 2) or numbers[2] not in (0, 1) or (numbers[1] and numbers[0] < 2):
        raise ValueError(
            f"expected --l-max with 0 or 2 for q_222, which needs an l of 2, and 0 or 1 for "
            f"q_1111, got {numbers}"
        )


def read_sets(options):
    """Return three lists of frames: those to train on, those held out, and the test frames.

    Raises:
        ValueError: a file cannot be read, or one of the first two lists would be empty.
    """
    names = {
        "energy": options.energy_key,
        "forces": options.forces_key,
        "stress": options.stress_key,
        "virial": options.virial_key,
    }
    keys = {label: name for label, name in names.items() if name}
    images = read(options.frames, keys)
    test = read(options.test, keys, has_all_keys=False)
    if options.validate:
        return images, read(options.validate, keys, has_all_keys=False), test
    return *split(images, options.held_out, options.seed), test


def split(images, share, seed):
    """Return the frames to train on, and a share of the frames that is held out.

    Frames are sorted by config_type and size, frequent kinds first, then by formula. With a share
    of 0.1, each tenth is held out, from the fifth on. So every kind has its share, and the few
    frames of the rarest kinds, at the end, are trained on, like lone atoms and the last frame of
    an element.

    Raises:
        ValueError: one of both would be empty.
    """

    def kind(number):
        return str(images[number].info.get("config_type", "")), len(images[number])

    order = np.random.default_rng(seed).permutation(len(images)).tolist()
    order = [number for number in order if not is_lone_atom(images[number])]
    frequency = Counter(map(kind, order))
    order.sort(key=lambda n: (-frequency[kind(n)], kind(n), images[n].get_chemical_formula()))
    left = Counter(symbol for image in images for symbol in set(image.symbols))
    count = max(1, int(share * len(order)))
    due = 0.5 if share * len(order) >= 1 else 1.0
    chosen = set()
    for number in order:
        due += share
        elements = set(images[number].symbols)
        is_due = due > 1 - 1e-9 and len(chosen) < count
        if is_due and min(left[element] for element in elements) > 1:
            due -= 1
            chosen.add(number)
            left.subtract(elements)
    if not chosen or len(chosen) == len(images):
        raise ValueError(
            f"expected frames to train on and to hold out, got {len(images)} in all with "
            f"--held-out {share:g}"
        )
    train = [image for number, image in enumerate(images) if number not in chosen]
    return train, [images[number] for number in sorted(chosen)]


def main(words=None):
    """Run the command."""
    torch.set_num_threads(1)  # frames are too small to share
    options = parse(words)
    # torchrun sets both.
    rank = int(os.environ.get("RANK", 0))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    sets = read_sets(options)
    # Rank 0 holds the folder before the other processes read it, since they wait for rank 0.
    with locked(options.folder) if rank == 0 else nullcontext():
        train(options, *sets, rank, processes)


def train(options, train_images, held_out_images, test_images, rank, processes):
    """Train in the folder of the options, and write the model.

    Args:
        options: those of the command.
        train_images: the frames to train on [Atoms].
        held_out_images: those held out.
        test_images: those for the errors of the finished model; empty: none.
        rank: the number of this process, of those that share a batch.
        processes: their number.
    """
    if processes > 1:
        distributed.init_process_group()  # gloo between CPUs, nccl between GPUs
    model, pairs = first_model(train_images, options)
    data = Data(frames_of(train_images, model.type_names), model.to(options.device))
    held_out = Data(frames_of(held_out_images, model.type_names), model)
    trainer = Trainer(
        model, data, options.steps, options.seed, options.batch, options.rates, options.weights
    )
    trainer.identity = identity_of(data, held_out, options)

    run = Run(trainer, held_out, options)
    run.resume()
    if rank == 0:
        report.print_frames(train_images, data.frames["virial"], len(held_out), model, pairs)
        print(f"weights of the loss: {' '.join(f'{weight:.3g}' for weight in trainer.weights)}")
        weights = weights_in_words(train_images)
        if weights:
            print(f"weights of frames: {weights}")
        report.print_overrun(model, pairs)
        report.print_overrun(model, pairs_of(held_out_images + test_images, model))
    run.train(is_first=rank == 0)
    if processes > 1:
        distributed.destroy_process_group()
    if rank == 0:
        run.finish(held_out_images, test_images)


if __name__ == "__main__":
    from calcops.__main__ import renamed

    renamed("train")
