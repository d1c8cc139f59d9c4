"""Operators that a graph file may name: torch's maths on tensors, fshard's collectives and random keys, no others.

A name of a file is only ever looked up in the tables of this module. What is not listed does not exist for a file: the
operators of torch that open files (`aten.from_file`), print, pin memory, take over another tensor's storage
(`aten.set_`), look past the end of a storage (`aten._reshape_alias`) or answer with anything but tensors and numbers,
and all operators of other libraries.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fshard.ext import _compat
from fshard.extend import sum_digits, sum_powers

_ELEMENTWISE = """
    __lshift__ __rshift__ abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bernoulli bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone
    complex _conj _conj_physical conj_physical copy copysign cos cosh deg2rad detach digamma div elu eq erf erfc erfinv
    exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac frexp gcd ge gelu gt hardshrink hardsigmoid hardswish
    hardtanh heaviside hypot i0 igamma igammac isin isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma
    log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg _neg_view nextafter polar polygamma pow
    _prelu_kernel rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit silu sin sinc sinh
    softplus softshrink sqrt sub tan tanh threshold _to_copy trunc where xlogy zero
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_xlog1py special_zeta
"""
_REDUCTIONS = """
    all amax amin aminmax _aminmax any argmax argmin bincount count_nonzero cummax cummin cumprod cumsum dist histc
    histogram kthvalue logcumsumexp _logcumsumexp logsumexp max mean median min mode nanmedian nansum norm prod renorm
    segment_reduce std std_mean sum trace var var_mean linalg_vector_norm
    _log_softmax _masked_softmax _safe_softmax _softmax
"""
_VIEWS = """
    alias as_strided diagonal expand permute select slice split split_with_sizes squeeze t transpose
    unbind unfold _unsafe_view unsafe_split unsafe_split_with_sizes unsqueeze view view_as_complex view_as_real
    alias_copy as_strided_copy detach_copy diagonal_copy expand_copy permute_copy select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy
    view_as_complex_copy view_as_real_copy _conj_copy _neg_view_copy
"""
_ARRANGEMENTS = """
    as_strided_scatter block_diag bucketize cat channel_shuffle _chunk_cat col2im constant_pad_nd diag_embed
    diagonal_scatter flip gather im2col index index_add index_copy index_fill index_put _index_put_impl index_reduce
    index_select masked_scatter masked_select nonzero nonzero_static _pack_padded_sequence pixel_shuffle
    pixel_unshuffle put reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d roll rot90 scatter scatter_add scatter_reduce searchsorted select_scatter
    slice_inverse slice_scatter sort stack _stack take topk tril triu _unique _unique2 unique_consecutive unique_dim
    unique_dim_consecutive _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
"""
_FACTORIES = """
    arange bartlett_window blackman_window empty empty_like empty_permuted empty_strided eye fft_fftfreq fft_rfftfreq
    full full_like hamming_window hann_window kaiser_window lift lift_fresh lift_fresh_copy linspace logspace new_empty
    new_empty_strided new_full new_ones new_zeros _new_zeros_with_same_feature_meta ones ones_like range scalar_tensor
    tril_indices triu_indices zeros zeros_like
"""
_RANDOM = """
    bernoulli binomial cauchy _dirichlet_grad exponential _fused_dropout geometric log_normal _masked_scale multinomial
    native_dropout normal normal_functional poisson rand rand_like randint randint_like randn randn_like random
    randperm rrelu_with_noise rrelu_with_noise_functional _sample_dirichlet _standard_gamma _standard_gamma_grad uniform
"""
_LINEAR_ALGEBRA = """
    addbmm addmm _addmm_activation addmv addr baddbmm bmm cholesky cholesky_inverse cholesky_solve
    _cholesky_solve_helper _compute_linear_combination dot _fft_c2c _fft_c2r _fft_r2c geqrf _grouped_mm _int_mm
    linalg_cholesky_ex linalg_cross _linalg_check_errors _linalg_det linalg_eig _linalg_eigh linalg_eigvals
    _linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
    linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg__powsum linalg_qr
    _linalg_slogdet linalg_solve_triangular _linalg_solve_ex _linalg_svd linear lu_unpack mm mv ormqr
    _scaled_grouped_mm _scaled_mm triangular_solve _trilinear vdot
"""
_LAYERS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional batch_norm_elemt
    batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats
    binary_cross_entropy binary_cross_entropy_with_logits _cdist_forward conv_depthwise3d _conv_depthwise2d conv_tbc
    convolution _convolution _ctc_loss cudnn_batch_norm _efficient_attention_forward embedding _embedding_bag
    _embedding_bag_forward_only embedding_renorm _euclidean_dist fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    _flash_attention_forward fractional_max_pool2d fractional_max_pool3d _fused_rms_norm glu grid_sampler_2d
    grid_sampler_3d _grid_sampler_2d_cpu_fallback huber_loss max_pool2d_with_indices max_pool3d_with_indices
    max_unpool2d max_unpool3d miopen_batch_norm mse_loss multi_margin_loss multilabel_margin_loss_forward
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training native_group_norm native_layer_norm nll_loss2d_forward nll_loss_forward
    _pdist_forward _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable slow_conv3d_forward _slow_conv2d_forward slow_conv_dilated2d
    slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss soft_margin_loss
    _thnn_fused_gru_cell _thnn_fused_lstm_cell _transform_bias_rescale_qkv upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _weight_norm_interface
"""
_DERIVATIVES = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward batch_norm_backward batch_norm_backward_elemt
    batch_norm_backward_reduce binary_cross_entropy_backward _cdist_backward convolution_backward _ctc_loss_backward
    cudnn_batch_norm_backward diagonal_backward _efficient_attention_backward elu_backward _embedding_bag_backward
    _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward embedding_dense_backward
    _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine_backward
    _flash_attention_backward fractional_max_pool2d_backward fractional_max_pool3d_backward _fused_rms_norm_backward
    gelu_backward glu_backward glu_backward_jvp glu_jvp grid_sampler_2d_backward grid_sampler_3d_backward
    _grid_sampler_2d_cpu_fallback_backward hardshrink_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward huber_loss_backward leaky_relu_backward linear_backward log_sigmoid_backward
    _log_softmax_backward_data logit_backward masked_scatter_backward _masked_softmax_backward matmul_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward miopen_batch_norm_backward mse_loss_backward
    multi_margin_loss_backward multilabel_margin_loss_backward native_batch_norm_backward native_dropout_backward
    native_group_norm_backward native_layer_norm_backward nll_loss2d_backward nll_loss_backward _pdist_backward
    _prelu_kernel_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward rrelu_with_noise_backward
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable_backward _segment_reduce_backward select_backward
    sigmoid_backward silu_backward slice_backward _slow_conv2d_backward smooth_l1_loss_backward
    soft_margin_loss_backward _softmax_backward_data softplus_backward softshrink_backward tanh_backward
    _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell_backward_impl threshold_backward unfold_backward
    upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward _weight_norm_interface_backward
"""
_ON_LISTS = """
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad _fused_adam _fused_adamw _fused_sgd
    _foreach_abs _foreach_acos _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_asin _foreach_atan _foreach_ceil
    _foreach_clamp_max _foreach_clamp_min _foreach_clone _foreach_copy _foreach_cos _foreach_cosh _foreach_div
    _foreach_erf _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac _foreach_lerp _foreach_lgamma
    _foreach_log _foreach_log10 _foreach_log1p _foreach_log2 _foreach_max _foreach_maximum _foreach_minimum _foreach_mm
    _foreach_mul _foreach_neg _foreach_norm _foreach_pow _foreach_powsum _foreach_reciprocal _foreach_round
    _foreach_rsqrt _foreach_sigmoid _foreach_sign _foreach_sin _foreach_sinh _foreach_sqrt _foreach_sub _foreach_tan
    _foreach_tanh _foreach_trunc _foreach_zero
"""
# Sizes and numbers that only a running graph knows, and what a graph asserts of its tensors.
_SIZES = """
    _assert_async _assert_scalar _assert_tensor_metadata _local_scalar_dense sym_constrain_range
    sym_constrain_range_for_size sym_numel sym_size sym_storage_offset sym_stride
"""
_OF_TORCH = (
    *(_ELEMENTWISE, _REDUCTIONS, _VIEWS, _ARRANGEMENTS, _FACTORIES, _RANDOM, _LINEAR_ALGEBRA),
    *(_LAYERS, _DERIVATIVES, _ON_LISTS, _SIZES),
)
# Collectives over an axis, which a file names by its place among those of the arguments.
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
COLLECTIVES = frozenset(f"fshard.{name}.default" for name in _COLLECTIVES)
# Named by their functions: what defines these operators has to be imported before a file is read.
SUMS = (sum_digits.__name__, sum_powers.__name__)
LISTED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "aten": frozenset(" ".join(_OF_TORCH).split()),
        "fshard": frozenset((*_COLLECTIVES, "random_state", "seed", "set_random_state", *SUMS)),
        # What waits for a buffer of a collective.
        "_c10d_functional": frozenset(("wait_tensor",)),
    }
)

# Python's own functions on numbers, which a graph has where a size is known only as it runs.
_ON_TWO_NUMBERS = "add sub mul truediv floordiv mod pow"
ON_NUMBERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{name: getattr(operator, name) for name in _ON_TWO_NUMBERS.split()},
        "neg": operator.neg,
        "sqrt": math.sqrt,
    }
)


class Operator(NamedTuple):
    """An operator that a file may name.

    Attributes:
        function: What runs it.
        schema: Its schema, by which torch tells the types of its arguments and results.
    """

    function: Callable[..., Any]
    schema: Any


@functools.lru_cache(maxsize=1024)
def find_operator(name: str) -> Operator | None:
    """Find an operator by its whole name; the parts are looked up in tables, and never followed as attributes.

    Args:
        name: Such as "aten.add.Tensor".

    Returns:
        The operator; None where no file may name it, or this torch has none of that name.
    """
    if name in ON_NUMBERS:
        parameters = "Scalar a, Scalar b" if name in _ON_TWO_NUMBERS.split() else "Scalar a"
        return Operator(ON_NUMBERS[name], _compat.parse_schema(f"{name}({parameters}) -> Scalar"))
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    names = LISTED.get(namespace, frozenset())
    # `add_`, which writes to its first argument, is where `add` is.
    if packet_name not in names and packet_name.removesuffix("_") not in names:
        return None
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None or overload not in packet.overloads():
        return None
    function = getattr(packet, overload)
    schema = _compat.schema_of(function)
    return None if schema is None else Operator(function, schema)
