//! Which file builds which operation.

use super::{Form, Op, Reason, attention, constexpr, states};
use super::{
    arithmetic, cast, compare, concat, conv, cumsum, einsum, elementary, fill, gather, layer_norm, linear,
    logic, matmul, norm, pad, range, reduce, reshape, scatter, select, shape, slice, slice_update, softmax,
    sort, split, tile, transpose,
};

pub(super) type Builder = fn(&mut Form<'_>) -> Result<Box<dyn Op>, Reason>;

/// Every operation by MIL's name (`const` is read at load and never runs).
const OPS: &[(&str, Builder)] = &[
    ("abs", elementary::build),
    ("acos", elementary::build),
    ("add", arithmetic::build),
    ("argsort", sort::build),
    ("asin", elementary::build),
    ("atan", elementary::build),
    ("atanh", elementary::build),
    ("band_part", fill::band_part),
    ("batch_norm", norm::build),
    ("cast", cast::build),
    ("ceil", elementary::build),
    ("clamped_relu", elementary::build),
    ("clip", elementary::build),
    ("concat", concat::build),
    ("conv", conv::build),
    ("cos", elementary::build),
    ("cosh", elementary::build),
    ("cumsum", cumsum::build),
    ("einsum", einsum::build),
    ("elu", elementary::build),
    ("equal", compare::build),
    ("erf", elementary::build),
    ("exp", elementary::build),
    ("exp2", elementary::build),
    ("expand_dims", reshape::build),
    ("fill", fill::build),
    ("fill_like", fill::like),
    ("flatten2d", reshape::build),
    ("floor", elementary::build),
    ("floor_div", arithmetic::build),
    ("gather", gather::build),
    ("gather_along_axis", gather::build),
    ("gather_nd", gather::build),
    ("gelu", elementary::build),
    ("greater", compare::build),
    ("greater_equal", compare::build),
    ("identity", elementary::build),
    ("instance_norm", norm::build),
    ("inverse", elementary::build),
    ("l2_norm", norm::build),
    ("layer_norm", layer_norm::build),
    ("leaky_relu", elementary::build),
    ("less", compare::build),
    ("less_equal", compare::build),
    ("linear", linear::build),
    ("linear_activation", elementary::build),
    ("log", elementary::build),
    ("logical_and", logic::build),
    ("logical_not", logic::build),
    ("logical_or", logic::build),
    ("logical_xor", logic::build),
    ("matmul", matmul::build),
    ("maximum", arithmetic::build),
    ("minimum", arithmetic::build),
    ("mod", arithmetic::build),
    ("mul", arithmetic::build),
    ("non_zero", fill::non_zero),
    ("not_equal", compare::build),
    ("one_hot", fill::one_hot),
    ("pad", pad::build),
    ("pow", arithmetic::build),
    ("prelu", norm::build),
    ("range_1d", range::build),
    ("real_div", arithmetic::build),
    ("reduce_argmax", reduce::build),
    ("reduce_argmin", reduce::build),
    ("reduce_l1_norm", reduce::build),
    ("reduce_l2_norm", reduce::build),
    ("reduce_log_sum", reduce::build),
    ("reduce_log_sum_exp", reduce::build),
    ("reduce_max", reduce::build),
    ("reduce_mean", reduce::build),
    ("reduce_min", reduce::build),
    ("reduce_prod", reduce::build),
    ("reduce_sum", reduce::build),
    ("reduce_sum_square", reduce::build),
    ("relu", elementary::build),
    ("relu6", elementary::build),
    ("reshape", reshape::build),
    ("reshape_like", reshape::build),
    ("reverse", slice::reverse),
    ("round", elementary::build),
    ("rsqrt", elementary::build),
    ("scaled_tanh", elementary::build),
    ("scatter", scatter::build),
    ("scatter_along_axis", scatter::build),
    ("scatter_nd", scatter::build),
    ("select", select::build),
    ("shape", shape::build),
    ("sigmoid", elementary::build),
    ("sigmoid_hard", elementary::build),
    ("sign", elementary::build),
    ("silu", elementary::build),
    ("sin", elementary::build),
    ("sinh", elementary::build),
    ("slice_by_index", slice::build),
    ("slice_by_size", slice::by_size),
    ("slice_update", slice_update::build),
    ("softmax", softmax::build),
    ("softplus", elementary::build),
    ("softplus_parametric", norm::build),
    ("softsign", elementary::build),
    ("split", split::build),
    ("sqrt", elementary::build),
    ("square", elementary::build),
    ("squeeze", reshape::build),
    ("stack", concat::build),
    ("sub", arithmetic::build),
    ("tan", elementary::build),
    ("tanh", elementary::build),
    ("threshold", elementary::build),
    ("thresholded_relu", elementary::build),
    ("tile", tile::build),
    ("topk", sort::build),
    ("transpose", transpose::build),
];

/// MIL's names of the operations the executor runs; `const` apart.
pub fn supported_ops() -> impl Iterator<Item = &'static str> {
    let built = ["cond", "while_loop", attention::NAME];
    constexpr::names().chain(states::NAMES).chain(built).chain(OPS.iter().map(|(name, _)| *name))
}

/// How to build the operation `kind`.
pub(crate) fn builder(kind: &str) -> Option<Builder> {
    OPS.binary_search_by(|(name, _)| (*name).cmp(kind)).ok().map(|i| OPS[i].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_for_its_search() {
        assert!(OPS.is_sorted_by(|a, b| a.0 < b.0));
    }
}
