//! The inputs of a prefill program, made from a prompt as the layout's `[inputs]` table names them.

use half::f16;
use kvbaton_exec::Array;
use kvbaton_layout::{Layout, Placement};
use kvbaton_mil::program::{DataType, Dim, TensorType};

use crate::{Error, ErrorKind};

/// An input of a program.
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    pub(crate) ty: &'a TensorType,
}

/// The type that an input has for `length` tokens at the start of a context: every dimension that the program leaves open
/// counts tokens, or the rows that they may attend to, which are as many.
pub(crate) fn for_length(ty: &TensorType, length: usize) -> TensorType {
    let fixed = |dim: &Dim| match dim {
        Dim::Fixed(n) => Dim::Fixed(*n),
        Dim::Unknown => Dim::Fixed(length),
    };
    TensorType { dtype: ty.dtype, shape: ty.shape.iter().map(fixed).collect() }
}

/// Values for every input of a program that takes `length` tokens at once.
///
/// Prompts are padded on the right; on the left where the layout's placement says so, which needs positions and
/// a mask: without them the pad would shift every key's position and be attended to.
pub(crate) fn build(
    layout: &Layout,
    wanted: &[Wanted<'_>],
    tokens: &[u32],
    length: usize,
) -> Result<Vec<(String, Array)>, Error> {
    build_after(layout, wanted, tokens, length, 0, &[])
}

/// The same for tokens that follow `position` others: `given` are inputs that are there already, the cache so far and
/// what another program left.
pub(crate) fn build_after(
    layout: &Layout,
    wanted: &[Wanted<'_>],
    tokens: &[u32],
    length: usize,
    position: usize,
    given: &[(String, Array)],
) -> Result<Vec<(String, Array)>, Error> {
    let names = &layout.inputs;
    let pad = if layout.placement == Placement::LeftPadded { length - tokens.len() } else { 0 };
    if layout.placement == Placement::LeftPadded && (names.positions.is_none() || names.mask.is_none()) {
        return Err(Error::new(
            ErrorKind::Layout,
            format!(
                "layout `{}` pads on the left, but its [inputs] name no positions and mask: \
                 keys would be shifted by the pad",
                layout.name
            ),
        ));
    }
    let is = |input: &Wanted<'_>, name: &Option<String>| name.as_deref() == Some(input.name);
    let mut inputs = Vec::new();
    for input in wanted {
        if let Some((name, array)) = given.iter().find(|(name, _)| name == input.name) {
            inputs.push((name.clone(), array.clone()));
            continue;
        }
        let array = if is(input, &names.tokens) {
            let mut ids = vec![0.0; length];
            for (slot, &id) in ids[pad..].iter_mut().zip(tokens) {
                *slot = f64::from(id);
            }
            array(input, &ids)?
        } else if is(input, &names.last_index) {
            array(input, &[(pad + tokens.len() - 1) as f64])?
        } else if is(input, &names.positions) {
            let positions: Vec<f64> =
                (0..length).map(|slot| (position + slot.saturating_sub(pad)) as f64).collect();
            array(input, &positions)?
        } else if is(input, &names.position) {
            array(input, &[position as f64])?
        } else if is(input, &names.mask) {
            let values = input.ty.fixed_shape().map_or(0, |s| s.iter().product());
            array(input, &causal_mask(length, pad, values / length.max(1), position))?
        } else {
            return Err(Error::new(
                ErrorKind::Layout,
                format!("layout `{}` does not say what the program's input `{}` is", layout.name, input.name),
            )
            .hint("name it in the layout's [inputs] table: tokens, hidden, last_index, position, positions or mask")
            .field("input", input.name));
        };
        inputs.push((input.name.to_owned(), array));
    }
    Ok(inputs)
}

/// 0 where row `query` may attend to slot `key`, −∞ elsewhere; `length` × `columns`, row-major. The rows follow
/// `position` others, which are in the first slots. A padding row attends to itself alone, so that its softmax has
/// something to divide by.
fn causal_mask(length: usize, pad: usize, columns: usize, position: usize) -> Vec<f64> {
    let mut mask = vec![f64::NEG_INFINITY; length * columns];
    for (query, row) in mask.chunks_mut(columns.max(1)).enumerate() {
        let last = position + query;
        let from = if query < pad { last } else { pad };
        let end = (last + 1).min(row.len());
        row[from.min(end)..end].fill(0.0);
    }
    mask
}

/// An input of the program's own type and shape; sizes of 1 are free, everything else must agree.
fn array(input: &Wanted<'_>, values: &[f64]) -> Result<Array, Error> {
    let shape = input.ty.fixed_shape().unwrap_or_default();
    if shape.iter().product::<usize>() != values.len() {
        return Err(Error::new(
            ErrorKind::Layout,
            format!(
                "the program's input `{}` is {}, {} values are to go there",
                input.name,
                input.ty,
                values.len()
            ),
        ));
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "token ids, positions and masks are small whole numbers"
    )]
    Ok(match input.ty.dtype {
        DataType::Int32 => Array::from_i32(&shape, &values.iter().map(|&v| v as i32).collect::<Vec<_>>())?,
        DataType::Float32 => Array::from_f32(&shape, &values.iter().map(|&v| v as f32).collect::<Vec<_>>())?,
        DataType::Float16 => {
            Array::from_f16(&shape, &values.iter().map(|&v| f16::from_f64(v)).collect::<Vec<_>>())?
        }
        other => {
            return Err(Error::new(
                ErrorKind::Layout,
                format!("the program's input `{}` has elements of type {other}", input.name),
            ));
        }
    })
}
