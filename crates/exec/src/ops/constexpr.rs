//! `constexpr_*`: compressed weights.
//!
//! Opsets up to iOS 17 keep the parts in attributes, iOS 18 in inputs, which may themselves be results of such
//! operations: quantised palettes, sparse palettes, quantised sparse weights. Sub-byte values are packed, the lowest
//! bits first.

mod sparse;

use std::sync::Arc;

use kvbaton_kernels::rows::Isa;
use kvbaton_mil::program::{Argument, Constant, ConstantData, DataType, ValueId};

use super::{Form, Reason, axis_of};
use crate::compressed::{Compressed, Grid, Lookup, Mask, Numbers, Recipe, Shift, Stored, WeightKey};
use crate::tensor::{Data, Tensor, count, is_float};

/// A result of a decompression.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// A weight that other operations take.
    Weight(Tensor),
    /// Integers: palettes are looked up before they are scaled. Those of eight bits are values of their own, too.
    Integers { recipe: Recipe, shape: Vec<usize>, dtype: DataType },
    /// Which elements of a sparse weight are stored.
    Mask { mask: Mask, shape: Vec<usize> },
    /// The stored elements of a sparse weight, as a dense one to which its mask belongs.
    Sparse { mask: Mask, dense: Recipe, dtype: DataType },
}

type Decompress = fn(&Form<'_>) -> Result<Vec<Built>, Reason>;

/// A result before it is checked against the program.
enum Built {
    Dense { recipe: Recipe, shape: Vec<usize>, dtype: DataType },
    Part(Part),
}

const DECOMPRESSIONS: &[(&str, Decompress)] = &[
    ("constexpr_affine_dequantize", affine),
    ("constexpr_blockwise_shift_scale", blockwise),
    ("constexpr_cast", cast),
    ("constexpr_lut_to_dense", lookup),
    ("constexpr_lut_to_sparse", sparse::lookup),
    ("constexpr_sparse_blockwise_shift_scale", sparse::blockwise),
    ("constexpr_sparse_to_dense", sparse::to_dense),
];

/// The results of a decompression, one an output; `None` if the operation is none.
pub(crate) fn evaluate(form: &Form<'_>) -> Option<Result<Vec<(ValueId, Part)>, Reason>> {
    let (_, decompress) = DECOMPRESSIONS.iter().find(|(name, _)| *name == form.op.kind)?;
    Some(decompress(form).and_then(|built| {
        if built.len() != form.op.outputs.len() {
            return Err(format!("{} results, the program declares {}", built.len(), form.op.outputs.len()));
        }
        let parts = form.op.outputs.iter().zip(built).map(|(id, built)| {
            let part = match built {
                Built::Part(part) => part,
                Built::Dense { recipe, shape, dtype } => {
                    let declared = form.function.tensor(*id).ok_or("its result is no tensor")?;
                    if declared.fixed_shape().as_ref() != Some(&shape) {
                        return Err(format!("comes out as {shape:?}, declared {declared}"));
                    }
                    dense(form, recipe, shape, dtype, declared.dtype)?
                }
            };
            Ok((*id, part))
        });
        parts.collect()
    }))
}

/// MIL's names of the decompressions.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    DECOMPRESSIONS.iter().map(|(name, _)| *name)
}

/// A dense result, still compressed.
fn dense(
    form: &Form<'_>,
    recipe: Recipe,
    shape: Vec<usize>,
    dtype: DataType,
    declared: DataType,
) -> Result<Part, Reason> {
    if dtype != declared {
        return Err(format!("comes out as {dtype}, declared {declared}"));
    }
    if !is_float(dtype) {
        return Ok(Part::Integers { recipe, shape, dtype });
    }
    let weight = Compressed::new(recipe, dtype, count(&shape), key(form));
    let data = Data::Compressed(Arc::new(weight));
    Ok(Part::Weight(Tensor::new(dtype, shape, data)))
}

/// What the operation's constants are; `None` where a part is a result itself.
fn key(form: &Form<'_>) -> Option<WeightKey> {
    let mut key = form.op.kind.clone().into_bytes();
    for name in form.op.inputs.keys().chain(form.op.attributes.keys()) {
        let constant = form.constant(name)?;
        key.extend(format!("|{name}={}@", constant.ty).bytes());
        match &constant.data {
            ConstantData::Inline(bytes) => key.extend(bytes),
            ConstantData::Strings(strings) => key.extend(strings.join("\0").bytes()),
            ConstantData::Blob(blob) => key.extend(format!("{blob:?}").bytes()),
        }
    }
    Some(key)
}

/// An argument that an earlier decompression made.
fn made<'a>(form: &Form<'a>, name: &str) -> Option<&'a Part> {
    match form.argument(name) {
        Some(Argument::Value(id)) => form.decompressed.get(id),
        _ => None,
    }
}

fn part<'a>(form: &Form<'a>, name: &str) -> Result<&'a Constant, Reason> {
    form.constant(name).ok_or_else(|| format!("`{name}` is missing or computed"))
}

fn shape_of(constant: &Constant) -> Result<Vec<usize>, Reason> {
    constant.ty.fixed_shape().ok_or_else(|| "a constant of unknown shape".to_owned())
}

fn stored(form: &Form<'_>, constant: &Constant) -> Result<Stored, Reason> {
    match &constant.data {
        ConstantData::Blob(blob) => Ok(Stored::Blob(Arc::clone(form.package), *blob)),
        ConstantData::Inline(bytes) => Ok(Stored::Inline(bytes.as_slice().into())),
        ConstantData::Strings(_) => Err("a constant of strings".to_owned()),
    }
}

/// The numbers of a constant.
fn numbers(form: &Form<'_>, name: &str) -> Result<(Numbers, Vec<usize>), Reason> {
    let constant = part(form, name)?;
    let shape = shape_of(constant)?;
    let dtype = constant.ty.dtype;
    let known = matches!(
        dtype,
        DataType::Int4
            | DataType::Int8
            | DataType::UInt1
            | DataType::UInt2
            | DataType::UInt3
            | DataType::UInt4
            | DataType::UInt6
            | DataType::UInt8
    );
    if !known && !is_float(dtype) {
        return Err(format!("`{name}` holds values of type {dtype}"));
    }
    let bits = dtype.bits().unwrap_or(8);
    Ok((Numbers { bytes: stored(form, constant)?, dtype, bits, count: count(&shape) }, shape))
}

/// Data of any of its forms, dense.
fn data(form: &Form<'_>, name: &str) -> Result<(Recipe, Vec<usize>), Reason> {
    match made(form, name) {
        Some(Part::Integers { recipe, shape, .. }) => Ok((recipe.clone(), shape.clone())),
        Some(_) => Err(format!("`{name}` is a decompressed weight, not codes")),
        None => numbers(form, name).map(|(numbers, shape)| (Recipe::Numbers(numbers), shape)),
    }
}

/// All values of a small part: scales, offsets, palettes.
fn values(form: &Form<'_>, name: &str) -> Result<(Vec<f32>, Vec<usize>, DataType), Reason> {
    if let Some(Part::Weight(tensor)) = made(form, name) {
        let mut values = vec![0.0; tensor.count()];
        match &tensor.data {
            Data::Compressed(weight) => weight.copy_to(Isa::best(), 0, &mut values),
            _ => tensor.copy_to(Isa::best(), &mut values)?,
        }
        return Ok((values, tensor.shape.clone(), tensor.dtype));
    }
    let (recipe, shape) = data(form, name)?;
    let dtype = match made(form, name) {
        Some(Part::Integers { dtype, .. }) => *dtype,
        _ => part(form, name)?.ty.dtype,
    };
    let mut values = vec![0.0; count(&shape)];
    recipe.floats(Isa::best(), 0, &mut values);
    Ok((values, shape, dtype))
}

/// Scales and offsets a block of `shape`, over `data`.
fn shift(form: &Form<'_>, data: Recipe, shape: &[usize]) -> Result<(Recipe, DataType), Reason> {
    let (scales, coarse, dtype) = values(form, "scale")?;
    if !is_float(dtype) {
        return Err(format!("scales of type {dtype}"));
    }
    let grid = Grid::new(shape, &coarse)?;
    let offsets = if form.has("offset") || form.constant("offset").is_some() {
        let (offsets, of, _) = values(form, "offset")?;
        if of != coarse {
            return Err(format!("offsets of shape {of:?} and scales of shape {coarse:?}"));
        }
        Some(offsets)
    } else {
        None
    };
    // The definition computes in the scale's type.
    let half = dtype == DataType::Float16;
    Ok((Recipe::Shift(Shift { data: Box::new(data), grid, scales, offsets, half }), dtype))
}

/// `(data - offset) * scale`, both given per block.
fn blockwise(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let (data, shape) = data(form, "data")?;
    let (recipe, dtype) = shift(form, data, &shape)?;
    Ok(vec![Built::Dense { recipe, shape, dtype }])
}

/// `(quantized_data - zero_point) * scale`, both one value or one for each index of an axis.
fn affine(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let (data, shape) = numbers(form, "quantized_data")?;
    let axis = axis_of(form.int("axis")?.ok_or("`axis` is missing")?, shape.len())?;
    let (mut scales, _, dtype) = values(form, "scale")?;
    let (mut offsets, ..) = values(form, "zero_point")?;
    let along = scales.len().max(offsets.len());
    for (name, given) in [("zero_point", &mut offsets), ("scale", &mut scales)] {
        if given.len() != 1 && given.len() != shape[axis] {
            return Err(format!("{} values of `{name}` along an axis of size {}", given.len(), shape[axis]));
        }
        if given.len() == 1 {
            given.resize(along, given[0]);
        }
    }
    let mut coarse = vec![1; shape.len()];
    coarse[axis] = along;
    let grid = Grid::new(&shape, &coarse)?;
    let data = Box::new(Recipe::Numbers(data));
    let recipe = Recipe::Shift(Shift { data, grid, scales, offsets: Some(offsets), half: false });
    Ok(vec![Built::Dense { recipe, shape, dtype }])
}

/// Palettes: iOS 18's one a block, the older one for the whole tensor.
fn lookup(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    if form.constant("shape").is_some() {
        return old_lookup(form);
    }
    let (indices, shape) = numbers(form, "indices")?;
    let (bits, dtype) = (indices.bits, indices.dtype);
    let (recipe, shape, dtype) = palettes(form, Recipe::Numbers(indices), &shape, bits, dtype)?;
    Ok(vec![Built::Dense { recipe, shape, dtype }])
}

fn dims(form: &Form<'_>, name: &str) -> Result<Vec<usize>, Reason> {
    let dims = form.ints(name)?.unwrap_or_default();
    dims.into_iter().map(|d| usize::try_from(d).map_err(|_| format!("a dimension of {d}"))).collect()
}

/// The number of elements of `shape`, which no constant has vouched for.
fn checked_count(shape: &[usize]) -> Result<usize, Reason> {
    let n = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    n.filter(|n| n.checked_mul(8).is_some()).ok_or_else(|| format!("a tensor of shape {shape:?}"))
}

fn old_lookup(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let shape = dims(form, "shape")?;
    let (palette, _, dtype) = values(form, "lut")?;
    let n = palette.len();
    if !n.is_power_of_two() || !(2..=256).contains(&n) {
        return Err(format!("a palette of {n} values"));
    }
    let (bits, elements) = (n.trailing_zeros() as usize, checked_count(&shape)?);
    let indices = part(form, "indices")?;
    let bytes = stored(form, indices)?;
    let have = bytes.get().len();
    if indices.ty.dtype != DataType::UInt8 || have != (elements * bits).div_ceil(8) {
        return Err(format!("{elements} indices of {bits} bits in {}", indices.ty));
    }
    // Any byte of eight bits picks an entry of 256.
    let numbers = Numbers { bytes, dtype: DataType::UInt8, bits, count: elements };
    let ones = vec![1; shape.len()];
    let recipe = Recipe::Lookup(Lookup {
        indices: Box::new(Recipe::Numbers(numbers)),
        bits,
        grid: Grid::new(&shape, &ones)?,
        palettes: vec![palette],
        size: elements,
        inner: 1,
    });
    Ok(vec![Built::Dense { recipe, shape, dtype }])
}

/// A lookup of `indices`, which have `bits` bits and, dense, the shape `shape`: the recipe, and shape and type of
/// what it gives.
fn palettes(
    form: &Form<'_>,
    indices: Recipe,
    shape: &[usize],
    bits: usize,
    indices_dtype: DataType,
) -> Result<(Recipe, Vec<usize>, DataType), Reason> {
    let (flat, lut_shape, dtype) = values(form, "lut")?;
    let [coarse @ .., entries, lanes] = lut_shape.as_slice() else {
        return Err(format!("palettes of shape {lut_shape:?}"));
    };
    if is_float(indices_dtype) || bits > 8 || *entries != 1 << bits {
        return Err(format!("indices of type {indices_dtype} into palettes of {entries} entries"));
    }
    let grid = Grid::new(shape, coarse)?;
    let axis = form.int("vector_axis")?.map(|axis| axis_of(axis, shape.len())).transpose()?;
    let mut result = shape.to_vec();
    let (mut size, mut inner) = (count(shape), 1);
    match (lanes, axis) {
        (0, _) => return Err("palettes of empty vectors".to_owned()),
        (1, _) => {}
        (_, None) => return Err(format!("palettes of vectors of {lanes}, and no `vector_axis`")),
        (_, Some(axis)) => {
            (size, inner) = (shape[axis], count(&shape[axis + 1..]));
            result[axis] *= lanes;
        }
    }
    checked_count(&result)?;
    let lane = |lane: usize| flat.iter().skip(lane).step_by(*lanes).copied().collect();
    let palettes: Vec<Vec<f32>> = (0..*lanes).map(lane).collect();
    let recipe = Recipe::Lookup(Lookup { indices: Box::new(indices), bits, grid, palettes, size, inner });
    Ok((recipe, result, dtype))
}

fn cast(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let (source, shape) = numbers(form, "source_val")?;
    let dtype = form.text("output_dtype")?;
    let dtype = match dtype {
        Some("fp16") => DataType::Float16,
        Some("fp32") => DataType::Float32,
        other => return Err(format!("to {}", other.unwrap_or("an unknown type"))),
    };
    Ok(vec![Built::Dense { recipe: Recipe::Numbers(source), shape, dtype }])
}
