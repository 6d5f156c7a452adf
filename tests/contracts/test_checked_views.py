"""load(..., check=True): an index of a kernel that is out of bounds is an error of the call."""

import copy
import pickle
import re
import shutil
import subprocess

import pytest
import torch

import calcops_jit
from _calcops_jit import request

RANKS = [0, 1, 2, 3, 4, 8]
# Operators for a rank: one reads x at an index, the other writes y there.
OF_RANK = """
const calcops::Contract contract{rank}(R"(
read{rank}(Tensor x, int[] index) -> Tensor value
write{rank}(Tensor x, int[] index) -> Tensor y
x      [{sizes}]; float64.
index  Its numbers.
value  []; like x.
y      [{sizes}]; like x.
)");
void read{rank}(calcops::View<const double, {rank}> x, calcops::List<int64_t> index,
                calcops::View<double, 0> value) {{
  (void)index;
  value() = x({indices});
}}
void write{rank}(calcops::View<const double, {rank}>, calcops::List<int64_t> index,
                 calcops::View<double, {rank}> y) {{
  (void)index;
  y({indices}) = 1;
}}
const calcops::Kernel cpu{rank}("read{rank}", read{rank}), cpu_write{rank}("write{rank}", write{rank});
"""
OTHERS = """
const calcops::Contract others(R"(
element(Tensor x, int i) -> Tensor value
strided(Tensor x, int i, int j) -> Tensor value
strided_element(Tensor x, int i) -> Tensor value
weighted(Tensor x, Tensor? weights=None) -> Tensor value
beyond(Tensor x, int more) -> Tensor y
_backward(Tensor x, Tensor grad, bool[2] output_mask=[True, True]) -> (Tensor x, Tensor grad)
thrown(Tensor x) -> Tensor value
of_a_view(Tensor x, int i, int j) -> Tensor value
of_a_struct(Tensor x, int i, int j) -> Tensor value
unwritten(Tensor x) -> (Tensor y, Tensor count)
x        [N, M]; float64.
weights  [N]; like x.
grad     [N, M]; like x.
i        A number.
j        A number.
more     A number.
value    []; like x.
y        [N, M]; like x.
count    [N]; int64.
)");
using Matrix = calcops::View<const double, 2>;
using Number = calcops::View<double, 0>;
using AnyMatrix = calcops::Strided<const double, 2>;
void element(Matrix x, int64_t i, Number value) {
  const double* const first = x.data;
  if (!x.data || x.data == nullptr || first != x.data + 0) return;
  value() = x.data[int(i)];
}
void strided(AnyMatrix x, int64_t i, int64_t j, Number value) { value() = x(i, unsigned(j)); }
void strided_element(AnyMatrix x, int64_t i, Number value) { value() = x.data[i]; }
void weighted(Matrix x, calcops::View<const double, 1> weights, Number value) {
  value() = x(0, 0) * weights(0);
}
void beyond(Matrix x, int64_t more, calcops::View<double, 2> y) {
#pragma omp parallel for
  for (int64_t i = 0; i < x.shape[0] + more; ++i) y(i, 0) = 1;
}
void backward(Matrix, Matrix, calcops::View<double, 2> x, calcops::View<double, 2> grad) {
  x(0, 0) = 1;
  grad(0, 0) = 1;
}
void thrown(Matrix x, Number value) {
  value() = x(9, 9);
  if (value() == 0) throw std::runtime_error("divided by 0");
}
void of_a_view(Matrix x, int64_t i, int64_t j, Number value) {
  const calcops::View<const double, 2> narrow{x.data, {3, 2}};
  value() = narrow(i, j);
}
struct Cell {
  Matrix x;
  int64_t i, j;
};
void of_a_struct(Cell cell, Number value) { value() = cell.x(cell.i, cell.j); }
void unwritten(Matrix, calcops::View<double, 2>, calcops::View<int64_t, 1>) {}
const calcops::Kernel kernels[] = {
    calcops::Kernel("thrown", thrown), calcops::Kernel("of_a_view", of_a_view),
    calcops::Kernel("of_a_struct", of_a_struct),
    calcops::Kernel("unwritten", unwritten),
    calcops::Kernel("element", element), calcops::Kernel("strided", strided),
    calcops::Kernel("strided_element", strided_element), calcops::Kernel("weighted", weighted),
    calcops::Kernel("beyond", beyond), calcops::Kernel("_backward", backward)};
"""


def _of_rank(rank: int) -> str:
    sizes = ", ".join("ABCDEFGH"[:rank])
    indices = ", ".join(f"index.data[{d}]" for d in range(rank))
    return OF_RANK.format(rank=rank, sizes=sizes, indices=indices)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that loads the operators of this file, with or without checks."""
    source = tmp_path_factory.mktemp("checked") / "checked.cpp"
    headers = "#include <calcops/operator.h>\n#include <stdexcept>\n"
    source.write_text(headers + "".join(map(_of_rank, RANKS)) + OTHERS)

    def load(check: bool) -> calcops_jit.Library:
        return calcops_jit.load("checked", source, "-fopenmp", None, "-fopenmp", check=check)

    return load


@pytest.fixture
def checked(load):
    return load(check=True)


def refuses(message: str):
    return pytest.raises(RuntimeError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("rank", RANKS)
def test_an_index_in_bounds_is_that_of_the_element(checked, rank):
    x = torch.randn([2, 3, 1, 2, 1, 1, 2, 2][:rank], dtype=torch.float64)
    last = [size - 1 for size in x.shape]
    read = getattr(checked, f"read{rank}")
    assert read(x, last) == x[tuple(last)]
    assert getattr(checked, f"write{rank}")(x, last)[tuple(last)] == 1


@pytest.mark.parametrize("rank", RANKS[1:])
@pytest.mark.parametrize("outside", [-1, "size", 2**40])
def test_an_index_out_of_bounds_is_an_error_in_every_dimension(checked, rank, outside):
    shape = [2, 3, 1, 2, 1, 1, 2, 2][:rank]
    x = torch.zeros(shape, dtype=torch.float64)
    for dimension in range(rank):
        index = [size - 1 for size in shape]
        index[dimension] = shape[dimension] if outside == "size" else outside
        at = ", ".join(map(str, index))
        end = f"of shape {shape}, got"
        with refuses(
            f"checked::read{rank}: expected the kernel to stay within the argument `x` {end} x({at})"
        ):
            getattr(checked, f"read{rank}")(x, index)
        with refuses(
            f"checked::write{rank}: expected the kernel to stay within the result `y` {end} y({at})"
        ):
            getattr(checked, f"write{rank}")(x, index)


def test_an_empty_tensor_has_no_index(checked):
    x = torch.zeros(3, 0, dtype=torch.float64)
    with refuses(
        "checked::read2: expected the kernel to stay within the argument `x` of shape [3, 0], "
        "got x(0, 0)"
    ):
        checked.read2(x, [0, 0])
    with pytest.raises(RuntimeError, match=r"of 0 numbers, got x\.data\[0\]$"):
        checked.element(x, 0)


@pytest.mark.parametrize("i", [-1, 6])
def test_an_index_of_data_is_compared_with_the_number_of_elements(checked, i):
    x = torch.arange(6, dtype=torch.float64).view(2, 3)
    assert [checked.element(x, k) for k in range(6)] == list(range(6))
    with pytest.raises(RuntimeError, match=rf"of 6 numbers, got x\.data\[{i}\]$"):
        checked.element(x, i)


def test_the_exception_of_a_kernel_that_read_out_of_bounds_is_that_of_the_index(checked):
    with pytest.raises(RuntimeError, match=r"of shape \[2, 3\], got x\(9, 9\)$"):
        checked.thrown(torch.ones(2, 3, dtype=torch.float64))


def test_a_view_that_a_kernel_makes_of_data_has_its_own_shape(checked):
    x = torch.arange(6, dtype=torch.float64).view(2, 3)
    assert checked.of_a_view(x, 2, 1) == 5
    with pytest.raises(RuntimeError, match=r"of shape \[3, 2\], got x\(0, 2\)$"):
        checked.of_a_view(x, 0, 2)


@pytest.mark.parametrize("check", [False, True])
def test_the_members_of_a_struct_are_parameters_of_the_kernel(load, check):
    x = torch.arange(6, dtype=torch.float64).view(2, 3)
    assert load(check).of_a_struct(x, 1, 2) == 5


def test_an_index_of_a_member_out_of_bounds_names_the_argument(checked):
    with refuses(
        "checked::of_a_struct: expected the kernel to stay within the argument `x` of shape "
        "[2, 3], got x(0, 3)"
    ):
        checked.of_a_struct(torch.ones(2, 3, dtype=torch.float64), 0, 3)


def test_a_result_that_is_not_written_shows(checked):
    y, count = checked.unwritten(torch.ones(2, 3, dtype=torch.float64))
    assert y.isnan().all()
    assert (count < -(2**60)).all()


def test_a_wrong_index_is_printed_before_the_kernel_ends(checked, capfd):
    with pytest.raises(RuntimeError):
        checked.element(torch.ones(1, 1, dtype=torch.float64), 7)
    assert capfd.readouterr().err == (
        "checked::element: expected the kernel to stay within the argument `x` of 1 numbers, "
        "got x.data[7]\n"
    )


def test_indices_of_a_strided_tensor_are_checked(checked):
    x = torch.arange(12, dtype=torch.float64).view(3, 4)[:, ::2].mT
    assert checked.strided(x, 1, 2) == x[1, 2]
    assert checked.strided_element(x, 10) == 10
    with pytest.raises(RuntimeError, match=r"of shape \[2, 3\], got x\(2, 0\)$"):
        checked.strided(x, 2, 0)
    with pytest.raises(RuntimeError, match=r"of 11 numbers, got x\.data\[11\]$"):
        checked.strided_element(x, 11)


def test_an_index_of_an_absent_tensor_is_an_error(checked):
    x = torch.ones(2, 2, dtype=torch.float64)
    assert checked.weighted(x, x[0]) == 1
    with refuses(
        "checked::weighted: expected the kernel to test the absent argument `weights`, "
        "got weights(0)"
    ):
        checked.weighted(x)
    backward = torch.ops.checked._backward
    for mask, name in (([False, True], "x"), ([True, False], "grad")):
        with pytest.raises(RuntimeError, match=f"test the absent result `{name}`, got {name}"):
            backward(x, x, mask)


def test_a_wrong_index_in_a_thread_is_an_error_and_the_next_call_works(checked):
    x = torch.zeros(1000, 1, dtype=torch.float64)
    with pytest.raises(
        RuntimeError, match=r"the result `y` of shape \[1000, 1\], got y\(1\d\d\d, 0"
    ):
        checked.beyond(x, 500)
    assert torch.equal(checked.beyond(x, 0), x + 1)


def test_check_exchanges_the_kernels_of_one_library(load):
    library = load(check=True)
    handle = library.read1
    x = torch.zeros(4, dtype=torch.float64)
    released = load(check=False)
    assert released is library
    assert released.read1 is handle
    assert handle(x[:2], [3]) == 0  # of the memory behind x[:2]
    assert load(check=True) is library
    with pytest.raises(RuntimeError, match="stay within the argument `x`"):
        handle(x[:2], [3])
    assert calcops_jit.reload() == []
    assert copy.copy(library) is library
    assert pickle.loads(pickle.dumps(library)) is library
    with pytest.raises(RuntimeError, match="stay within the argument `x`"):
        handle(x[:2], [3])


CUDA = """
#include <calcops/operator.h>
template <class Real>
__global__ void twice_on_gpu(calcops::View<const Real, 1> x, calcops::View<Real, 1> y) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  y(i) = x(i) + x.data[i];
}
template <class Real>
cudaError_t twice(calcops::View<const Real, 1> x, calcops::View<Real, 1> y, cudaStream_t stream) {
  twice_on_gpu<<<1, 32, 0, stream>>>(x, y);
  return cudaGetLastError();
}
const calcops::Kernel cuda("twice", twice<float>, twice<double>);
"""


def test_nvcc_compiles_checked_views(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    source = tmp_path / "twice.cu"
    source.write_text(CUDA)
    include = f"-I{request.CONTRACTS}/include"
    command = [nvcc, "-std=c++17", "-ptx", request.CHECK, include, source, "-o", tmp_path / "ptx"]
    subprocess.run(command, check=True)
    assert "trap;" in (tmp_path / "ptx").read_text()
