"""A NEP in the form that a training changes, and its initial parameters.

A nep.txt is a poor place to train in. The functions of the radial basis are positive and nearly
collinear, and so are the numbers of a descriptor, whose means are large beside their deviations.
The parameters here are those of a nep.txt after linear maps that are fixed when the training
begins, by all of its frames:

- The coefficients of radial functions belong to a basis that is orthonormal over the distances in
  the frames.
- The nets take the descriptor less its mean, over its deviation, for each type of centre.
- Each type has an energy of its own, like a Deep Potential. It is minus the bias of a NepFile.

The maps are exact, so that a nep.txt gives the same results.
"""

import numpy as np
import torch
from calcops.deepmd.deep_potential import least_energies
from calcops.nep.model import Nep, load
from calcops.nep.nep_file import NepFile, check_limits, kMostNeighbours, write
from calcops.nep.radial_splines import radial_basis
from calcops.potentials.neighbours import neighbours, pair_vectors

kLeastVariance = 1e-3  # of a radial function over the distances, in units of the largest
kLeastDeviation = 1e-3  # of a number of the descriptor, in units of its root mean square
# Of an invariant, in units of that of a single neighbour at the usual distances. In perfect
# crystals some invariants are zero but for rounding errors, which must not be scaled to inputs.
kLeastInvariant = 1e-6
kMoreNeighbours = 1.25  # GPUMD takes memory for so many more than in the frames
kShareOfFunctions = 0.3  # of Muon's rate, since radial functions shift the whole descriptor
# Of the nets' matrices, in units of the rate. It bounds how steep nets become. Without it, errors
# are smaller in the frames to train on, and larger in others.
kDecay = 0.3


def new_nep(frames, pairs, type_names, options):
    """Return the NEP that a training begins with, for the options of the command.

    Args:
        frames: a dict of datasets.frames_of.
        pairs: the pairs.Pairs of these frames.
        type_names: the names of the types.
        options: of the command: cutoff, angular_cutoff, n_max, basis_size, l_max, neurons, seed.
    """
    T = len(type_names)
    l_max, q222, q1111 = options.l_max
    functions = [n + 1 for n in options.n_max]
    basis = [n + 1 for n in options.basis_size]
    dim = functions[0] + functions[1] * (l_max + (q222 > 0) + (q1111 > 0))
    file = NepFile(
        version=4,
        type_names=type_names,
        zbl=None,
        cutoffs=np.array([[options.cutoff, options.angular_cutoff]] * T),
        l_max=l_max,
        has_q222=q222 > 0,
        has_q1111=q1111 > 0,
        w0=np.zeros((T, options.neurons, dim)),
        b0=np.zeros((T, options.neurons)),
        w1=np.zeros((T, options.neurons)),
        bias=np.zeros(T),
        c=tuple(np.zeros((T, T, b, f)) for b, f in zip(basis, functions)),
        scale=np.ones(dim),
    )
    return TrainedNep(file, frames, pairs, np.random.default_rng(options.seed))


class TrainedNep(Nep):
    """A NEP whose parameters are those that a training changes.

    Args:
        file: the NepFile that it begins with.
        frames: a dict of datasets.frames_of.
        pairs: the pairs.Pairs of these frames.
        random: a numpy.random.Generator that draws new parameters in place of those of the file;
            None: keep them.
    """

    file_name = "nep.txt"  # of the model of a training
    shares = {"_functions": kShareOfFunctions}  # of Muon's rate
    decay = kDecay  # of the nets' matrices

    def __init__(self, file, frames, pairs, random=None):
        super().__init__(file)
        self.requires_grad_(False)
        shortest = torch.from_numpy(pairs.shortest)
        if random is None:  # a nep.txt does not say how short its pairs were
            shortest = torch.where(torch.from_numpy(pairs.counts) > 0, shortest, 0.0)
        self.register_buffer("shortest", shortest)
        self.most_neighbours = int(pairs.most.sum())
        n_max = [c.shape[3] - 1 for c in file.c]
        basis_size = [c.shape[2] - 1 for c in file.c]
        # One more neuron gives the types energies of their own in a nep.txt.
        check_limits(file.w0.shape[1] + (len(file.w0) > 1), n_max, basis_size)
        moments, most = moments_of_basis(frames, file)
        self.neighbours = neighbours_of_head(most, file.neighbours)
        for part, name in enumerate(("radial", "angular")):
            if not moments[part].any():
                raise ValueError(
                    f"expected neighbours within the {name} cutoff of "
                    f"{file.cutoffs[:, part].max():g} A, got none at all"
                )
            to_basis = orthonormal(moments[part])
            c = getattr(self, f"{name}_c")
            c = torch.linalg.solve(to_basis, c) if random is None else functions_like(c, random)
            self.register_buffer(f"{name}_to_basis", to_basis)
            self.register_parameter(f"{name}_functions", parameter_of(c))
        pairs_per_atom = moments[1].trace() / pairs.atoms.sum()
        mean, deviation = statistics_of(self, frames, self.least_invariants(pairs_per_atom))
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        if random is None:
            self.keep_nets()
        else:
            self.draw_nets(random)
            self.shift(frames["types"], frames["energy"])

    def keep_nets(self):
        """Make parameters of the nets of the file."""
        w = self.scale.unsqueeze(-1) * self.w0
        self.hidden = parameter_of(self.deviation.unsqueeze(-1) * w)
        self.thresholds = parameter_of(self.b0.unsqueeze(1) - self.mean.unsqueeze(1) @ w)
        self.outputs = parameter_of(self.w1.unsqueeze(-1))
        self.energies = parameter_of(-self.bias)

    def draw_nets(self, random):
        """Make parameters of random nets, for descriptors of mean 0 and deviation 1."""

        def normal(size, *shape):
            return parameter_of(torch.from_numpy(random.normal(0, size, shape)))

        nets, dim, neurons = self.w0.shape
        self.scale = 1 / self.deviation.mean(0)
        self.hidden = normal(dim**-0.5, nets, dim, neurons)
        self.thresholds = normal(0.5, nets, 1, neurons)
        self.outputs = normal(0.3 * neurons**-0.5, nets, neurons, 1)
        self.energies = torch.nn.Parameter(torch.zeros(nets, dtype=torch.float64))

    def train(self, mode: bool = True):
        """Stay in training: every call computes the energies from the parameters."""
        return super().train()

    def settings(self):
        """Return the attributes of the model that its parameters do not contain."""
        return {
            "type_names": self.type_names,
            "cutoffs": self.cutoffs,
            "l_max": [self.l_max, self.has_q222, self.has_q1111],
            "version": self.version,
        }

    def shift(self, types, differences):
        """Add to the types' energies what comes nearest to `differences` [F] of frames' energies.

        A model of one net for all types has one energy for all. Types without atoms keep theirs.
        """
        nets = len(self.energies)
        if nets == 1:
            types = torch.where(types >= 0, 0, -1)
        with torch.no_grad():
            self.energies += least_energies(types, differences, nets).to(self.energies)

    def atom_energies(self, types, kind, d):
        """Return the energies [n] of atoms; the arguments are those of Nep.atom_energies."""
        q = self.unscaled_descriptors(kind, d)
        energy = q.new_zeros(len(q))
        w, b0, w1 = self.nets()
        for t in range(len(w)):
            atoms = types >= 0 if len(w) == 1 else types == t
            own = atoms.nonzero().squeeze(-1)
            hidden = torch.tanh(torch.addmm(-b0[t], q[own], w[t]))
            energy = energy.index_add(0, own, hidden @ w1[t] + self.energies[t])
        if self.zbl_outer > 0:
            energy = energy + self.energies_of_zbl(d, kind)
        return energy

    def nets(self):
        """Return w0 [nets, dim, neurons] for descriptors without a scale, b0 and w1."""
        w = self.hidden / self.deviation.unsqueeze(-1)
        b0 = self.thresholds + self.mean.unsqueeze(1) @ w
        return w, b0.squeeze(1), self.outputs.squeeze(-1)

    def tables(self):
        """Return what Nep.tables returns, from the parameters that are trained."""
        return (
            self.radial_basis @ self.radial_coefficients(),
            self.angular_basis @ self.angular_coefficients(),
        )

    def radial_coefficients(self):
        """Return the coefficients [kinds, basis, F] of the radial part."""
        return self.radial_to_basis @ self.radial_functions

    def angular_coefficients(self):
        """Return the coefficients [kinds, basis, F] of the angular part."""
        return self.angular_to_basis @ self.angular_functions

    @torch.no_grad()
    def least_invariants(self, squares):
        """Return the least deviations [dim] of the descriptor; 0 for its radial part.

        Args:
            squares: the sum of the squares of the angular part's basis over the neighbours of an
                atom, the mean of all atoms.
        """
        g = (squares * self.angular_functions.square().sum(1).mean(0)).sqrt()
        A = g.new_zeros((self.l_max + 1) ** 2, 1, len(g))
        for l in range(self.l_max + 1):  # noqa: E741
            A[l * l + l, 0] = ((2 * l + 1) / (4 * torch.pi)) ** 0.5 * g  # Y_l0 along z
        radial = g.new_zeros(self.radial_functions.shape[-1])
        return torch.cat([radial, kLeastInvariant * self.invariants(A)[0].abs()])

    def write(self, path):
        """Write the model as a nep.txt."""
        write(self.file(), path)

    def from_file(self, path):
        """Return the Nep that `write` wrote, which knows the shortest pairs of the frames."""
        model = load(path)
        model.register_buffer("shortest", self.shortest.cpu())
        model.most_neighbours = self.most_neighbours
        return model

    @torch.no_grad()
    def file(self):
        """Return the NepFile of the model."""
        w, b0, w1 = self.nets()
        w0 = w / self.scale.unsqueeze(-1)
        c = self.radial_coefficients(), self.angular_coefficients()
        return self.file_of(c, w0, b0, w1, -self.energies)


def functions_like(c, random):
    """Return random coefficients of the shape of c [kinds, basis, F], in an orthonormal basis.

    The first functions of a kind are orthonormal, too.
    """
    _, basis, functions = c.shape
    drawn = torch.from_numpy(random.normal(0, basis**-0.5, c.shape))
    count = min(basis, functions)
    drawn[..., :count] = torch.linalg.qr(drawn[..., :count])[0]
    return drawn


def parameter_of(tensor):
    """Return a parameter with the values of a tensor.

    Its memory is in order, since the fused Adam pairs the numbers of parameters and gradients by
    their places in memory.
    """
    return torch.nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))


def pairs_of_frames(frames, cutoff):
    """Yield types [1, n], list_neigh [1, n, K] and Rij [1, n, K, 3] of each frame."""
    for b in range(len(frames["types"])):
        types, positions, cells, pbc = (
            frames[key][b : b + 1] for key in ("types", "positions", "cells", "pbc")
        )
        list_neigh, shift = neighbours(positions, cells, cutoff, types, pbc)
        yield types, list_neigh, pair_vectors(positions, list_neigh, shift)


def moments_of_basis(frames, file):
    """Return the second moments of the radial basis of both parts, over all pairs of frames.

    Args:
        frames: a dict of datasets.frames_of.
        file: a NepFile, whose types are those of the frames.

    Returns:
        Two matrices [basis, basis], and the most neighbours of an atom in each part. The cutoffs of
        types count.
    """
    of_parts = [np.zeros((c.shape[2],) * 2) for c in file.c]
    most = [0, 0]
    for types, list_neigh, Rij in pairs_of_frames(frames, file.cutoffs.max()):
        r = Rij[0].norm(dim=-1).numpy()
        others = types[0][list_neigh[0].clamp(min=0)].numpy()
        centres = types[0].unsqueeze(-1).numpy()
        for part, moments in enumerate(of_parts):
            of_types = file.cutoffs[:, part]
            cutoffs = (of_types[centres] + of_types[others]) / 2
            is_pair = (list_neigh[0].numpy() >= 0) & (r < cutoffs)
            values = radial_basis(r[is_pair] / cutoffs[is_pair], 1.0, len(moments))
            moments += values.T @ values
            most[part] = max(most[part], int(is_pair.sum(-1).max()))
    return [torch.from_numpy(moments) for moments in of_parts], most


def neighbours_of_head(most, known):
    """Return the numbers of neighbours for the head of a nep.txt.

    Args:
        most: two numbers, the most neighbours of an atom within each cutoff in the frames.
        known: those in the head of the file that the training begins with, or None.

    Raises:
        ValueError: GPUMD cannot run a model of so many neighbours.
    """
    if max(most) > kMostNeighbours:
        raise ValueError(
            f"expected at most {kMostNeighbours} neighbours of an atom, as GPUMD runs, "
            f"got {max(most)}: a smaller cutoff has fewer"
        )
    enough = [int(kMoreNeighbours * count) + 1 for count in most]
    return tuple(max(numbers) for numbers in zip(enough, known or enough))


def orthonormal(moments):
    """Return the matrix whose columns are an orthonormal basis, for moments of the radial basis.

    Combinations of functions that hardly occur in the frames stay small: a variance below
    kLeastVariance counts as that much.
    """
    variances, vectors = torch.linalg.eigh(moments / moments.trace())
    return vectors / variances.clamp(min=kLeastVariance * variances.max()).sqrt()


@torch.no_grad()
def statistics_of(model, frames, least):
    """Return mean and deviation [nets, dim] of the descriptors of a model, by type of the centre.

    Types without atoms get the statistics of all atoms. Deviations are at least `least` [dim].
    """
    all_types = []
    descriptors = []
    for types, list_neigh, Rij in pairs_of_frames(frames, model.cutoff):
        kind = model.kinds(types, list_neigh)
        q = model.unscaled_descriptors(kind.flatten(0, 1), Rij.flatten(0, 1))
        descriptors.append(q[types[0] >= 0])
        all_types.append(types[types >= 0])
    q = torch.cat(descriptors)
    types = torch.cat(all_types)
    least = torch.maximum(least, kLeastDeviation * q.square().mean(0).sqrt())
    means = []
    deviations = []
    for t in range(len(model.w0)):
        own = q[types == t] if len(model.w0) > 1 else q
        own = own if len(own) else q
        means.append(own.mean(0))
        deviations.append(torch.maximum(own.std(0, correction=0), least).clamp(min=1e-30))
    return torch.stack(means), torch.stack(deviations)
