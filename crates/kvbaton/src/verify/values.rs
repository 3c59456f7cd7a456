//! The second rung: what arrived is what the reference computed.

use half::{bf16, f16};
use kvbaton_layout::{DType, Part};
use serde_json::{Value, json};

use super::bytes::same_shape;
use super::explain::{Suspect, explain, turned};
use super::metrics::Sums;
use super::report::{Rung, RungName, Status, Thresholds, Where};
use super::rows::{PartRows, Reader, kept, parts};
use crate::{CacheView, Error};

/// Points of the curve of errors against position.
const BINS: usize = 128;

/// Compares `found` with `reference`, layer by layer, keys and values apart.
///
/// Rows are compared that both hold; where that is none of a layer that either holds, the rung is `not_run` unless
/// another layer fails it. Of each head of each layer: the cosine, the norm and the largest error of a row;
/// of each layer also the largest difference. Values that are not finite fail at their place, and so do finite ones
/// that `dtype`, the decoder's type, cannot hold.
///
/// # Errors
///
/// When heads or lanes of a layer differ, so that there is nothing to compare.
pub fn compare_values(
    reference: &CacheView,
    found: &CacheView,
    thresholds: &Thresholds,
    dtype: DType,
) -> Result<Rung, Error> {
    let (left, right) = (kept(reference), kept(found));
    if left.len() != right.len() {
        let why = format!("the reference keeps {} layers, the cache {}", left.len(), right.len());
        return Ok(Rung::not_run(RungName::Values, why));
    }
    let (ours, theirs) = (Reader::new(reference)?, Reader::new(found)?);
    let mut tally = Tally::new(*thresholds, dtype);
    for (&layer, &there) in left.iter().zip(&right) {
        for part in parts(&reference.cache().layers[layer]) {
            let (expected, found) = match (ours.read(layer, part)?, theirs.read(there, part)?) {
                (Some(expected), Some(found)) => (expected, found),
                (None, None) => continue,
                _ => {
                    tally.unmatched.get_or_insert((part, layer));
                    continue;
                }
            };
            same_shape(part, layer, &expected, &found)?;
            let rows: Vec<i64> =
                found.rows.iter().copied().filter(|r| expected.index(*r).is_some()).collect();
            if rows.is_empty() {
                tally.unmatched.get_or_insert((part, layer));
                continue;
            }
            tally.part(reference, part, layer, &expected.at(&rows), &found.at(&rows))?;
        }
    }
    Ok(tally.rung())
}

/// What the comparison has found so far.
struct Tally {
    thresholds: Thresholds,
    dtype: DType,
    cosine: f64,
    norm_error: f64,
    row_error: f64,
    max_abs: f64,
    unusual: [u64; 3],
    layers: Vec<Value>,
    /// By part: position, and the largest error of a row there.
    curves: [Vec<(i64, f64)>; 2],
    /// The first value that is not finite, or too large; then the first head that is too far off.
    broken: Option<(Where, String)>,
    place: Option<Where>,
    note: Option<String>,
    keys_turned: Option<usize>,
    /// The first part of which no row is on both sides.
    unmatched: Option<(Part, usize)>,
}

impl Tally {
    fn new(thresholds: Thresholds, dtype: DType) -> Tally {
        Tally {
            thresholds,
            dtype,
            cosine: 1.0,
            norm_error: 0.0,
            row_error: 0.0,
            max_abs: 0.0,
            unusual: [0; 3],
            layers: Vec::new(),
            curves: [Vec::new(), Vec::new()],
            broken: None,
            place: None,
            note: None,
            keys_turned: None,
            unmatched: None,
        }
    }

    fn part(
        &mut self,
        view: &CacheView,
        part: Part,
        layer: usize,
        expected: &PartRows,
        found: &PartRows,
    ) -> Result<(), Error> {
        self.count_unusual(part, layer, found);
        let mut whole = Sums::default();
        let (mut heads, mut worst, mut wrong) = (Vec::new(), (0.0, 0), None);
        for head in 0..found.heads {
            let sums = Sums::of(expected.head(head), found.head(head));
            whole.add(&sums);
            let d = sums.distance();
            let (row, error) =
                self.rows_of(part, head, sums.expected_norm(found.rows.len()), expected, found);
            let norm_error = (d.norm_ratio - 1.0).abs();
            let norm_error = if norm_error.is_nan() { f64::INFINITY } else { norm_error };
            // A cosine that is not a number is as bad as none.
            let cosine = if d.cosine.is_nan() { 0.0 } else { d.cosine };
            self.cosine = self.cosine.min(cosine);
            self.norm_error = self.norm_error.max(norm_error);
            self.row_error = self.row_error.max(error);
            let t = &self.thresholds;
            let bad = cosine < t.min_cosine || norm_error > t.max_norm_error || error > t.max_row_error;
            if bad && (wrong.is_none() || error > worst.0) {
                wrong = Some((head, row));
                worst = (error, row);
            }
            heads.push(json!({"cosine": cosine, "norm_ratio": d.norm_ratio, "relative": d.relative,
                              "row_error": error, "row": found.rows[row]}));
        }
        let d = whole.distance();
        self.max_abs = self.max_abs.max(d.max_abs);
        self.layers.push(json!({
            "layer": layer, "tensor": part, "max_abs": d.max_abs, "relative": d.relative, "cosine": d.cosine,
            "norm_ratio": d.norm_ratio, "heads": heads,
        }));
        if part == Part::Value && self.keys_turned == Some(layer) && wrong.is_none() {
            self.note = Some(format!(
                "the keys of layer {layer} are turned while its values are right: the rotary base, its scaling or \
                 the positions differ"
            ));
        }
        if let Some((head, row)) = wrong.filter(|_| self.place.is_none()) {
            let lane = largest(expected.row(head, row), found.row(head, row));
            self.place = Some(Where {
                head: Some(head),
                row: Some(found.rows[row]),
                lane: Some(lane),
                ..Where::of(part, layer)
            });
            self.note = explain(view, &Suspect { part, layer, expected, found })?;
            if self.note.is_none() && part == Part::Key && turned(expected, found) {
                self.keys_turned = Some(layer);
            }
        }
        Ok(())
    }

    /// The worst row of a head and its error, relative to the larger of its norm and the head's usual one.
    fn rows_of(
        &mut self,
        part: Part,
        head: usize,
        usual: f64,
        expected: &PartRows,
        found: &PartRows,
    ) -> (usize, f64) {
        let mut worst = (0, 0.0);
        for at in 0..found.rows.len() {
            let sums = Sums::of(expected.row(head, at), found.row(head, at));
            let scale = sums.expected_norm(1).max(usual);
            let error = if scale > 0.0 { sums.difference_norm() / scale } else { sums.difference_norm() };
            let error = if error.is_nan() { f64::INFINITY } else { error };
            if error > worst.1 {
                worst = (at, error);
            }
            let curve = match part {
                Part::Key => &mut self.curves[0],
                Part::Value => &mut self.curves[1],
                _ => continue,
            };
            let position = found.rows[at];
            match curve.binary_search_by_key(&position, |(p, _)| *p) {
                Ok(i) => curve[i].1 = curve[i].1.max(error),
                Err(i) => curve.insert(i, (position, error)),
            }
        }
        worst
    }

    fn count_unusual(&mut self, part: Part, layer: usize, found: &PartRows) {
        let narrow = |v: f32| match self.dtype {
            DType::Float16 => f16::from_f32(v).is_infinite(),
            DType::BFloat16 => bf16::from_f32(v).is_infinite(),
            _ => false,
        };
        for (index, &value) in found.values.iter().enumerate() {
            let (kind, what) = match value {
                v if v.is_nan() => (0, "is not a number".to_owned()),
                v if v.is_infinite() => (1, format!("is {v}")),
                v if narrow(v) => (2, format!("is {v}, too large for {}", self.dtype)),
                _ => continue,
            };
            self.unusual[kind] += 1;
            if self.broken.is_none() {
                let place = Where::element(part, layer, index, found);
                self.broken = Some((place, format!("an element of the {part} of layer {layer} {what}")));
            }
        }
    }

    fn rung(self) -> Rung {
        let t = self.thresholds;
        let (place, note) = match self.broken {
            Some((place, note)) => (Some(place), Some(note)),
            None => (self.place, self.note),
        };
        if let (None, Some((part, layer))) = (&place, self.unmatched) {
            let why = format!("no row of the {part} of layer {layer} is in both caches");
            return Rung::not_run(RungName::Values, why);
        }
        let status = if place.is_some() { Status::Fail } else { Status::Pass };
        let note = note.or_else(|| {
            place.as_ref().map(|_| {
                format!(
                    "smallest cosine {:.6} (at least {}), largest error of a norm {:.4} (at most {}), of a row {:.4} \
                     (at most {})",
                    self.cosine, t.min_cosine, self.norm_error, t.max_norm_error, self.row_error, t.max_row_error
                )
            })
        });
        let curve = |points: &[(i64, f64)]| -> Vec<Value> {
            let size = points.len().div_ceil(BINS).max(1);
            let worst = |bin: &[(i64, f64)]| bin.iter().map(|(_, e)| *e).fold(0.0, f64::max);
            points.chunks(size).map(|bin| json!([bin[0].0, worst(bin)])).collect()
        };
        let figures = [
            ("min_cosine", json!(self.cosine)),
            ("max_norm_error", json!(self.norm_error)),
            ("max_row_error", json!(self.row_error)),
            ("max_abs", json!(self.max_abs)),
            ("nan", json!(self.unusual[0])),
            ("infinity", json!(self.unusual[1])),
            ("overflow", json!(self.unusual[2])),
            ("positions", json!({"key": curve(&self.curves[0]), "value": curve(&self.curves[1])})),
            ("layers", json!(self.layers)),
        ];
        Rung { place, note, ..Rung::new(RungName::Values, status) }.with(figures)
    }
}

/// The lane that is furthest off.
fn largest(expected: &[f32], found: &[f32]) -> usize {
    let off = |i: &usize| {
        let d = (found[*i] - expected[*i]).abs();
        if d.is_nan() { f32::INFINITY } else { d }
    };
    (0..found.len()).max_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0)
}
