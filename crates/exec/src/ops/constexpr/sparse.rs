//! Sparse weights: a mask that says which elements are stored, and those, as they are, looked up or scaled.

use kvbaton_mil::program::DataType;

use super::{
    Built, Form, Part, Reason, checked_count, count, dims, made, numbers, palettes, part, shape_of, shift,
    stored,
};
use crate::compressed::{Mask, Recipe};

/// A mask with a bit an element: iOS 18's form.
fn bit_mask(form: &Form<'_>, name: &str) -> Result<(Mask, Vec<usize>), Reason> {
    if let Some(part) = made(form, name) {
        let Part::Mask { mask, shape } = part else { return Err(format!("`{name}` is no mask")) };
        return Ok((mask.clone(), shape.clone()));
    }
    let constant = part(form, name)?;
    if constant.ty.dtype != DataType::UInt1 {
        return Err(format!("`{name}` is {}, not a mask of bits", constant.ty));
    }
    let shape = shape_of(constant)?;
    Ok((Mask::new(stored(form, constant)?, count(&shape))?, shape))
}

/// The stored elements of a sparse weight as a dense one, their type, and, of indices, their bits.
fn sparse_data(form: &Form<'_>, name: &str, mask: &Mask) -> Result<(Recipe, DataType, usize), Reason> {
    match made(form, name) {
        Some(Part::Sparse { mask: own, dense, dtype }) if own.equals(mask) => {
            Ok((dense.clone(), *dtype, dtype.bits().unwrap_or(8)))
        }
        Some(Part::Sparse { .. }) => Err(format!("`{name}` belongs to another mask")),
        Some(_) => Err(format!("`{name}` is no part of a sparse weight")),
        None => {
            let (numbers, shape) = numbers(form, name)?;
            if numbers.count != mask.set() || shape.len() != 1 {
                let bits = mask.set();
                return Err(format!("`{name}` has shape {shape:?}, the mask {bits} elements that are set"));
            }
            let (dtype, bits) = (numbers.dtype, numbers.bits);
            let stored = Box::new(Recipe::Numbers(numbers));
            Ok((Recipe::Scatter { mask: mask.clone(), stored }, dtype, bits))
        }
    }
}

/// A sparse result: its mask, and its stored elements.
fn sparse(mask: Mask, shape: Vec<usize>, dense: Recipe, dtype: DataType) -> Vec<Built> {
    let part = Part::Mask { mask: mask.clone(), shape };
    vec![Built::Part(part), Built::Part(Part::Sparse { mask, dense, dtype })]
}

pub(super) fn lookup(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let (mask, shape) = bit_mask(form, "indices_mask")?;
    let (indices, indices_dtype, bits) = sparse_data(form, "indices_nonzero_data", &mask)?;
    if !matches!(indices, Recipe::Scatter { .. }) {
        return Err("`indices_nonzero_data` is computed, not stored".to_owned());
    }
    let (dense, result, dtype) = palettes(form, indices, &shape, bits, indices_dtype)?;
    if result == shape {
        return Ok(sparse(mask, shape, dense, dtype));
    }
    // Vectors: every bit stands for as many elements.
    let axis = (0..shape.len()).find(|a| result[*a] != shape[*a]).unwrap_or(0);
    let times = result[axis] / shape[axis].max(1);
    let wide = mask.repeated(count(&shape), count(&shape[axis + 1..]), times)?;
    Ok(sparse(wide, result, dense, dtype))
}

pub(super) fn blockwise(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let (mask, shape) = bit_mask(form, "data_mask")?;
    let (data, ..) = sparse_data(form, "nonzero_data", &mask)?;
    let (dense, dtype) = shift(form, data, &shape)?;
    Ok(sparse(mask, shape, dense, dtype))
}

pub(super) fn to_dense(form: &Form<'_>) -> Result<Vec<Built>, Reason> {
    let (mask, shape) = if form.constant("shape").is_some() {
        let shape = dims(form, "shape")?;
        let constant = part(form, "mask")?;
        if constant.ty.dtype != DataType::UInt8 {
            return Err(format!("`mask` is {}, not bytes", constant.ty));
        }
        (Mask::new(stored(form, constant)?, checked_count(&shape)?)?, shape)
    } else {
        bit_mask(form, "mask")?
    };
    let (dense, dtype, _) = sparse_data(form, "nonzero_data", &mask)?;
    let recipe = match dense {
        scatter @ Recipe::Scatter { .. } => scatter,
        dense => Recipe::Masked { mask, dense: Box::new(dense) },
    };
    Ok(vec![Built::Dense { recipe, shape, dtype }])
}
