//! What became of rows that are not what they should be: the usual mistakes, tried one after the other.
//!
//! An explanation is a guess that the values bear out: what was found is alike to something else that was expected.

use half::{bf16, f16};
use kvbaton_layout::{DType, Part};

use super::metrics::{Sums, alike};
use super::rows::{PartRows, Reader, kept, parts};
use crate::{CacheView, Error};

/// Rows that are looked up to find a shift.
const PROBES: usize = 12;

/// The first part that differs, on both sides, with the same rows.
pub(crate) struct Suspect<'a> {
    pub(crate) part: Part,
    /// The layer, as the side that was expected numbers it.
    pub(crate) layer: usize,
    pub(crate) expected: &'a PartRows,
    pub(crate) found: &'a PartRows,
}

/// One sentence on what `suspect` holds instead, where it is something known. `view` is the side that was expected.
pub(crate) fn explain(view: &CacheView, suspect: &Suspect<'_>) -> Result<Option<String>, Error> {
    let Suspect { part, layer, expected, found } = *suspect;
    if alike(&expected.values, &found.values) || differing(suspect) <= (found.values.len() / 64).max(1) {
        return Ok(few(suspect));
    }
    if found.values.iter().all(|v| *v == 0.0) {
        return Ok(Some(format!("the {part} of layer {layer} is all zeros: it was never filled")));
    }
    if let Some(heads) = moved_heads(expected, found) {
        return Ok(Some(format!("heads of layer {layer} are in another order: {heads}")));
    }
    if let Some(text) = moved_rows(suspect) {
        return Ok(Some(text));
    }
    let reader = Reader::new(view)?;
    for other in kept(view) {
        for there in parts(&view.cache().layers[other]) {
            if (other, there) == (layer, part) {
                continue;
            }
            let Some(held) = reader.read(other, there)? else { continue };
            if same_rows(&held, found) && alike(&held.at(&found.rows).values, &found.values) {
                let what = if other == layer {
                    format!("the {part} of layer {layer} holds its {there}: keys and values are exchanged")
                } else {
                    format!("layer {layer} holds the {there} of layer {other}")
                };
                return Ok(Some(what));
            }
        }
    }
    Ok(misread(suspect))
}

fn same_rows(held: &PartRows, found: &PartRows) -> bool {
    held.heads == found.heads
        && held.lanes == found.lanes
        && found.rows.iter().all(|r| held.index(*r).is_some())
}

fn differs((expected, found): &(&f32, &f32)) -> bool {
    expected.to_bits() != found.to_bits() && !(expected.is_nan() && found.is_nan())
}

fn differing(suspect: &Suspect<'_>) -> usize {
    suspect.expected.values.iter().zip(&suspect.found.values).filter(differs).count()
}

/// Some elements among many that are right.
fn few(suspect: &Suspect<'_>) -> Option<String> {
    let Suspect { part, layer, expected, found } = *suspect;
    let count = differing(suspect);
    let (e, f) = expected.values.iter().zip(&found.values).find(differs)?;
    let bits = |v: f32| super::rows::bits(v, found.dtype);
    let flipped = bits(*e) ^ bits(*f);
    let how = if flipped.count_ones() == 1 {
        format!("bit {} is flipped: {e} became {f}", flipped.trailing_zeros())
    } else {
        format!("{e} became {f}")
    };
    Some(match count {
        n if n > (found.values.len() / 64).max(1) => return None,
        1 => format!("one element of the {part} of layer {layer} differs: {how}"),
        n => format!(
            "{n} of {} elements of the {part} of layer {layer} differ, the first: {how}",
            found.values.len()
        ),
    })
}

/// `0 ← 1, 1 ← 0` where every head that is not its own is another.
fn moved_heads(expected: &PartRows, found: &PartRows) -> Option<String> {
    if expected.heads != found.heads || expected.heads < 2 {
        return None;
    }
    let mut moves = Vec::new();
    for head in 0..found.heads {
        if alike(expected.head(head), found.head(head)) {
            continue;
        }
        let other = (0..expected.heads).find(|o| alike(expected.head(*o), found.head(head)))?;
        moves.push(format!("head {head} holds head {other}"));
    }
    (!moves.is_empty()).then(|| moves.join(", "))
}

/// Rows that are all moved by as much, or around a ring.
fn moved_rows(suspect: &Suspect<'_>) -> Option<String> {
    let Suspect { layer, expected, found, .. } = *suspect;
    let count = found.rows.len();
    if count < 2 || matches!(suspect.part, Part::State) {
        return None;
    }
    let step = (count / PROBES).max(1);
    let (mut shift, mut around, mut seen) = (None, None, 0);
    for at in (0..count).step_by(step) {
        // A row without a counterpart has left at one end, or come in from nowhere.
        let Some(from) = like(expected, found.row(0, at), at) else { continue };
        seen += 1;
        let moved = from.cast_signed() - at.cast_signed();
        let turned = moved.rem_euclid(count.cast_signed());
        let agrees = |slot: &mut Option<isize>, value| *slot.get_or_insert(value) == value;
        let (straight, circular) = (agrees(&mut shift, moved), agrees(&mut around, turned));
        if !circular {
            return None;
        }
        if !straight {
            shift = Some(isize::MAX);
        }
    }
    let probes = count.div_ceil(step);
    match (shift?, around?) {
        (0, _) | (_, 0) => None,
        _ if seen * 2 < probes.max(3) => None,
        (isize::MAX, by) => Some(format!(
            "rows of layer {layer} are rotated by {by}: a ring of {count} slots was read in the order of its slots"
        )),
        (by, _) => {
            let (rows, way) = (by.unsigned_abs(), if by > 0 { "later" } else { "earlier" });
            let s = if rows == 1 { "" } else { "s" };
            Some(format!("rows of layer {layer} are shifted: each holds the row {rows} position{s} {way}"))
        }
    }
}

/// The row of head 0 that is most like `wanted`, if it is alike; its own place is preferred among equals.
fn like(expected: &PartRows, wanted: &[f32], own: usize) -> Option<usize> {
    if wanted.iter().all(|v| *v == 0.0) {
        return None;
    }
    let cosine = |at: &usize| Sums::of(expected.row(0, *at), wanted).distance().cosine;
    let best = (0..expected.rows.len()).max_by(|a, b| cosine(a).total_cmp(&cosine(b)))?;
    let best = if cosine(&own) >= cosine(&best) { own } else { best };
    alike(expected.row(0, best), wanted).then_some(best)
}

/// Bits of one type read as another.
fn misread(suspect: &Suspect<'_>) -> Option<String> {
    let Suspect { part, layer, expected, found } = *suspect;
    let half_as_brain = |v: &f32| f16::from_bits(bf16::from_f32(*v).to_bits()).to_f32();
    let brain_as_half = |v: &f32| bf16::from_bits(f16::from_f32(*v).to_bits()).to_f32();
    let again = |read: &dyn Fn(&f32) -> f32| found.values.iter().map(read).collect::<Vec<_>>();
    let says = |was: DType, read: DType| {
        Some(format!("the {part} of layer {layer} holds {was} bits that were read as {read}"))
    };
    if alike(&expected.values, &again(&half_as_brain)) {
        return says(DType::Float16, DType::BFloat16);
    }
    if alike(&expected.values, &again(&brain_as_half)) {
        return says(DType::BFloat16, DType::Float16);
    }
    None
}

/// What keys say that are wrong where the values beside them are right: in every head, as an angle is the same for
/// all of them, rows have kept their norms and not their directions, all but the first, which no position turns.
pub(crate) fn turned(expected: &PartRows, found: &PartRows) -> bool {
    let rows = found.rows.len();
    let first = found.rows.first().is_some_and(|p| *p == 0);
    rows > 1
        && (0..found.heads).all(|head| {
            let pair = |at: usize| (expected.row(head, at), found.row(head, at));
            let kept_norm =
                |(e, f): (&[f32], &[f32])| (0.9..1.1).contains(&Sums::of(e, f).distance().norm_ratio);
            let same = |(e, f): (&[f32], &[f32])| alike(e, f);
            (0..rows).all(|at| kept_norm(pair(at)))
                && (!first || same(pair(0)))
                && !(0..rows).all(|at| same(pair(at)))
        })
}
