//! The first rung: what arrived is what left.

use kvbaton_layout::{DType, Encoding, Part};
use serde::Serialize;
use serde_json::json;

use super::explain::{Suspect, explain};
use super::report::{Rung, RungName, Status, Where};
use super::rows::{PartRows, Reader, attended, bits, kept, parts, round};
use crate::{CacheView, Error, ErrorKind};

/// One part of one layer that is not what left.
#[derive(Serialize)]
struct Differing {
    layer: usize,
    tensor: Part,
    differing: u64,
    elements: u64,
    first: Where,
}

/// Compares the live rows of `arrived` with those of `source`, converted to the type they arrived in by the scalar
/// definition, and their BLAKE3 digests.
///
/// Rows are compared that both hold; a row that the next token reads and `arrived` lacks is a difference. A cache that
/// arrived quantised cannot be compared by bytes unless it left so: the rung is `not_run` then.
///
/// # Errors
///
/// When heads or lanes of a layer differ, so that there is nothing to compare.
pub fn compare_bytes(source: &CacheView, arrived: &CacheView) -> Result<Rung, Error> {
    let (left, right) = (kept(source), kept(arrived));
    if left.len() != right.len() {
        return layers_missing(source, arrived);
    }
    let (from, to) = (Reader::new(source)?, Reader::new(arrived)?);
    let mut tally = Tally::default();
    if source.tokens_seen() != arrived.tokens_seen() {
        let (a, b) = (source.tokens_seen(), arrived.tokens_seen());
        tally.refuse(
            Where { row: Some(i64::try_from(a.min(b)).unwrap_or(i64::MAX)), ..Where::default() },
            format!("the source has seen {a} tokens, what arrived {b}"),
        );
    }
    for (&layer, &there) in left.iter().zip(&right) {
        for part in parts(&source.cache().layers[layer]) {
            let pair = (from.read(layer, part)?, to.read(there, part)?);
            let (expected, found) = match pair {
                (Some(expected), Some(found)) => (expected, found),
                (None, _) => continue,
                (Some(expected), None) => {
                    let row = expected.rows.first().copied();
                    let place = Where { row, ..Where::of(part, layer) };
                    tally.refuse(place, format!("no row of the {part} of layer {layer} arrived"));
                    continue;
                }
            };
            same_shape(part, layer, &expected, &found)?;
            if found.encoding != Encoding::Plain && found.encoding != expected.encoding {
                let why = format!(
                    "layer {layer} arrived as {}, it left as {}: bytes cannot be compared",
                    found.encoding, expected.encoding
                );
                return Ok(Rung::not_run(RungName::Bytes, why));
            }
            let window = arrived.cache().layers[there].window();
            let lost = |r: &&i64| found.index(**r).is_none() && attended(window, source.tokens_seen(), **r);
            if let Some(&row) = expected.rows.iter().find(lost) {
                let place = Where { row: Some(row), ..Where::of(part, layer) };
                tally.refuse(
                    place,
                    format!("row {row} of layer {layer} did not arrive: the next token reads it"),
                );
            }
            tally.part(source, part, layer, &expected, &found)?;
        }
    }
    Ok(tally.rung())
}

/// Refuses to compare what has another shape.
pub(crate) fn same_shape(
    part: Part,
    layer: usize,
    expected: &PartRows,
    found: &PartRows,
) -> Result<(), Error> {
    let (a, b) = ([expected.heads, expected.lanes], [found.heads, found.lanes]);
    if a == b {
        return Ok(());
    }
    let message = format!(
        "the {part} of layer {layer} has {} heads of {} lanes in one cache, {} heads of {} in the other",
        a[0], a[1], b[0], b[1]
    );
    Err(Error::new(ErrorKind::Incompatible, message).field("layer", layer))
}

/// Fewer layers, or more: the first place where they no longer run alongside.
fn layers_missing(source: &CacheView, arrived: &CacheView) -> Result<Rung, Error> {
    let (left, right) = (kept(source), kept(arrived));
    let (from, to) = (Reader::new(source)?, Reader::new(arrived)?);
    let alongside = |a: usize, b: usize| -> Result<bool, Error> {
        for part in parts(&source.cache().layers[a]) {
            let (Some(e), Some(f)) = (from.read(a, part)?, to.read(b, part)?) else { return Ok(false) };
            let converted = |v: &f32| bits(round(*v, f.dtype), f.dtype);
            if !e.values.iter().map(converted).eq(f.values.iter().map(|v| bits(*v, f.dtype))) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let mut at = 0;
    while at < left.len().min(right.len()) && alongside(left[at], right[at])? {
        at += 1;
    }
    let layer = left.get(at).copied().unwrap_or(left.len());
    let why = format!(
        "{} layers left, {} arrived: layer {layer} is the first that is not there",
        left.len(),
        right.len()
    );
    let place = Where { layer: Some(layer), ..Where::default() };
    Ok(Rung { place: Some(place), note: Some(why), ..Rung::new(RungName::Bytes, Status::Fail) })
}

/// What the comparison has found so far.
#[derive(Default)]
struct Tally {
    rows: u64,
    elements: u64,
    differing: u64,
    source: blake3::Hasher,
    arrived: blake3::Hasher,
    dtype: Option<DType>,
    parts: Vec<Differing>,
    place: Option<Where>,
    note: Option<String>,
}

impl Tally {
    fn refuse(&mut self, place: Where, note: String) {
        self.place.get_or_insert(place);
        self.note.get_or_insert(note);
    }

    fn part(
        &mut self,
        view: &CacheView,
        part: Part,
        layer: usize,
        expected: &PartRows,
        found: &PartRows,
    ) -> Result<(), Error> {
        let rows: Vec<i64> = found.rows.iter().copied().filter(|r| expected.index(*r).is_some()).collect();
        let (mut expected, found) = (expected.at(&rows), found.at(&rows));
        expected.values.iter_mut().for_each(|v| *v = round(*v, found.dtype));
        for (hasher, side) in [(&mut self.source, &expected), (&mut self.arrived, &found)] {
            hasher.update(format!("{layer} {part} {} {:?} {}\n", side.heads, rows, side.lanes).as_bytes());
            let mut bytes = Vec::with_capacity(4 * side.values.len());
            bytes.extend(side.values.iter().flat_map(|v| bits(*v, found.dtype).to_le_bytes()));
            hasher.update(&bytes);
        }
        let differs =
            |i: &usize| bits(expected.values[*i], found.dtype) != bits(found.values[*i], found.dtype);
        let elements = found.values.len();
        let differing = (0..elements).filter(differs).count() as u64;
        self.dtype.get_or_insert(found.dtype);
        self.rows += rows.len() as u64;
        self.elements += elements as u64;
        self.differing += differing;
        let Some(first) = (0..elements).find(differs) else { return Ok(()) };
        let place = Where::element(part, layer, first, &found);
        if self.place.is_none() {
            let suspect = Suspect { part, layer, expected: &expected, found: &found };
            self.note = explain(view, &suspect)?;
            self.place = Some(place.clone());
        }
        self.parts.push(Differing {
            layer,
            tensor: part,
            differing,
            elements: elements as u64,
            first: place,
        });
        Ok(())
    }

    fn rung(self) -> Rung {
        let status = if self.place.is_none() { Status::Pass } else { Status::Fail };
        let digest = |hasher: &blake3::Hasher| format!("blake3:{}", hasher.finalize().to_hex());
        let figures = [
            ("dtype", json!(self.dtype.map(DType::name))),
            ("rows", json!(self.rows)),
            ("elements", json!(self.elements)),
            ("differing", json!(self.differing)),
            ("source_digest", json!(digest(&self.source))),
            ("arrived_digest", json!(digest(&self.arrived))),
            ("parts", json!(self.parts)),
        ];
        let note = match (self.note, self.place.is_some()) {
            (None, true) => Some(format!("{} of {} elements differ", self.differing, self.elements)),
            (note, _) => note,
        };
        Rung { place: self.place, note, ..Rung::new(RungName::Bytes, status) }.with(figures)
    }
}
