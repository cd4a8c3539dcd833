"""Operations whose 16-bit kernels differ between CUDA and a CPU, as data.

``MISSING_KERNELS``    operations without a CUDA kernel in FP16 or BF16, with torch's own words there: a policy that is emulated on a CPU
               refuses what they refuse
``CPU_LACKS``  operations that CUDA computes in FP16 or BF16 and a CPU does not: they are emulated

Which operations these are follows from torch 2.13's test database (``op_db``, ``dtypesIfCUDA`` and ``backward_dtypesIfCUDA``). An entry
there is a Python function; listed here is the operation in it that has no kernel, so that other callers of it are covered and shared
parts are not. ``tests/oracles/cuda_kernels.py`` compares this list with the database. The words come from
``aten/src/ATen/native``: where a kernel depends on sizes (``lu_factor_cublas``, ``lu_factor_cusolver``), the name is one of them.

Fourier transforms have rules of their own (``engine.matrix_units.fourier``): cuFFT's FP16 depends on sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

BOTH = ("fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Missing:
    """An operation without a CUDA kernel."""

    op: str
    """Its ATen name; all its overloads, and its form that works in place, are meant."""
    words: str
    """What torch says on CUDA; ``{dtype}`` stands for torch's name of the format, ``{sizes}`` for the sizes of the operand."""
    formats: tuple[str, ...] = BOTH
    backward_of: int | None = None
    """If only the gradient has no kernel, the number of the operand whose gradient that is; None if the operation itself has none."""


def _kernel(name: str) -> str:
    return f"\"{name}\" not implemented for '{{dtype}}'"


_KERNELS = """
    angle angle_cuda
    igamma igamma_cuda
    igammac igammac_cuda
    _cdist_forward cdist_cuda
    _pdist_forward pdist_cuda
    _ctc_loss ctc_loss_cuda
    cholesky cholesky_cusolver
    linalg_cholesky_ex cholesky_cusolver
    cholesky_inverse cholesky_cuda_potri
    _cholesky_solve_helper cholesky_cuda_potrs
    geqrf geqrf_cuda
    linalg_qr geqrf_cuda
    ormqr ormqr_cuda
    linalg_householder_product orgqr_cuda
    _linalg_svd svd_cuda_gesvdj
    _linalg_eigh linalg_eigh_cuda
    linalg_eig linalg_eig_cuda
    _linalg_eigvals linalg_eig_cuda
    linalg_lu_factor_ex lu_factor_cublas
    linalg_lu lu_factor_cublas
    _linalg_det lu_factor_cublas
    _linalg_solve_ex lu_factor_cublas
    linalg_lu_solve lu_solve_cublas
    linalg_ldl_factor_ex ldl_factor_looped_cusolver
    linalg_ldl_solve ldl_solve_looped_cusolver
    triangular_solve triangular_solve_cuda
    linalg_solve_triangular triangular_solve_cuda
    lu_unpack lu_unpack
"""

_SPECIAL = """
    zeta ndtri log_ndtr erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
    modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
    laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""

_CHECKS = {
    "linalg_inv_ex": "linalg.inv: Low precision dtypes not supported. Got {dtype}",
    "_linalg_slogdet": "linalg.slogdet: Low precision dtypes not supported. Got {dtype}",
    "logdet": "logdet: Low precision dtypes not supported. Got {dtype}",
    "linalg_pinv": "linalg.pinv({dtype}{{{sizes}}}): expected a tensor with 2 or more dimensions of float, double, cfloat or cdouble types",
    "linalg_lstsq": "This function doesn't handle types other than float and double",
    "linalg_matrix_rank": "This function doesn't handle types other than float and double",
    "linalg_vander": "linalg.vander supports floating point, complex, and integer tensors, but got {dtype}",
    "quantile": "quantile() input tensor must be either float or double dtype",
    "nanquantile": "quantile() input tensor must be either float or double dtype",
}
"""What operations made of several others refuse before any kernel."""

_COMPLEX = "Expected both inputs to be Half, Float or Double tensors but got {dtype} and {dtype}"

MISSING_KERNELS: tuple[Missing, ...] = (
    *(Missing(op=op, words=_kernel(name)) for op, name in map(str.split, _KERNELS.strip().splitlines())),
    *(Missing(op=f"special_{name}", words=_kernel(f"{name}_cuda")) for name in _SPECIAL.split()),
    *(Missing(op=op, words=words) for op, words in _CHECKS.items()),
    Missing(op="histc", words="HalfTensor is not supported", formats=("fp16",)),
    Missing(op="histc", words=_kernel("histc"), formats=("bf16",)),
    Missing(op="polar", words=_kernel("polar_cuda"), formats=("fp16",)),
    Missing(op="polar", words=_COMPLEX, formats=("bf16",)),
    Missing(op="complex", words=_COMPLEX, formats=("bf16",)),
    Missing(
        op="view_as_complex",
        words="view_as_complex is only supported for half, float and double tensors, but got a tensor of scalar type: {dtype}",
        formats=("bf16",),
    ),
    Missing(op="special_i1", words=_kernel("i1_backward"), backward_of=0),
    Missing(op="special_i1e", words=_kernel("i1e_backward"), backward_of=0),
    Missing(
        op="_embedding_bag",
        words=_kernel("_embedding_bag_per_sample_weights_backward_cuda"),
        formats=("bf16",),
        backward_of=6,
    ),
)


CPU_LACKS: tuple[str, ...] = (
    "avg_pool3d",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "rrelu",
    "_upsample_bilinear2d_aa",
    "_safe_softmax",  # the gradient only
)
DRAWS = ("rrelu",)
"""Operations of ``CPU_LACKS`` that draw random numbers."""
