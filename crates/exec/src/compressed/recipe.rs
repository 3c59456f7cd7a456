//! How runs of a weight's elements are computed.

use std::sync::Arc;

use half::f16;
use kvbaton_kernels::rows::{self, Isa};
use kvbaton_mil::Package;
use kvbaton_mil::program::{BlobRef, DataType};

use super::{Grid, Mask, PIECE};

/// Bytes of a constant, in a mapped file or in the program.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    Blob(Arc<Package>, BlobRef),
    Inline(Arc<[u8]>),
}

impl Stored {
    pub(crate) fn get(&self) -> &[u8] {
        match self {
            Stored::Blob(package, blob) => package.blob_bytes(*blob),
            Stored::Inline(bytes) => bytes,
        }
    }
}

/// A constant of numbers, packed as in a weight file.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) bytes: Stored,
    pub(crate) dtype: DataType,
    /// Bits of an element.
    pub(crate) bits: usize,
    pub(crate) count: usize,
}

impl Numbers {
    /// Elements of at most eight bits from `start` on, as they are stored.
    pub(crate) fn codes(&self, isa: Isa, start: usize, out: &mut [u8]) {
        // Eight codes fill whole bytes: a run starts with them.
        let skip = start % 8;
        let packed = &self.bytes.get()[(start - skip) / 8 * self.bits..];
        if skip == 0 {
            return rows::unpack(isa, self.bits, packed, out);
        }
        let mut first = [0; 8];
        let head = (8 - skip).min(out.len());
        rows::unpack(isa, self.bits, packed, &mut first[..skip + head]);
        let (now, rest) = out.split_at_mut(head);
        now.copy_from_slice(&first[skip..skip + head]);
        if !rest.is_empty() {
            rows::unpack(isa, self.bits, &packed[self.bits..], rest);
        }
    }

    fn floats(&self, isa: Isa, start: usize, out: &mut [f32]) {
        let bytes = self.bytes.get();
        match self.dtype {
            DataType::Float16 => {
                let mut halves = [f16::ZERO; PIECE];
                let (bytes, _) = bytes[start * 2..].as_chunks::<2>();
                for (bytes, out) in bytes.chunks(PIECE).zip(out.chunks_mut(PIECE)) {
                    let halves = &mut halves[..out.len()];
                    for (h, b) in halves.iter_mut().zip(bytes) {
                        *h = f16::from_le_bytes(*b);
                    }
                    rows::widen(isa, halves, out);
                }
            }
            DataType::Float32 => {
                let (singles, _) = bytes[start * 4..].as_chunks::<4>();
                for (x, b) in out.iter_mut().zip(singles) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            dtype => {
                let mut codes = [0; PIECE];
                let signed = matches!(dtype, DataType::Int4 | DataType::Int8);
                for (i, out) in out.chunks_mut(PIECE).enumerate() {
                    let codes = &mut codes[..out.len()];
                    self.codes(isa, start + i * PIECE, codes);
                    rows::numbers(isa, self.bits, signed, codes, out);
                }
            }
        }
    }
}

/// Values picked from palettes.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    /// [`Recipe::Numbers`], or those of a sparse weight, of `bits` bits.
    pub(crate) indices: Box<Recipe>,
    pub(crate) bits: usize,
    /// Where indices use which palette.
    pub(crate) grid: Grid,
    /// For each lane of a vector (one for scalars): a palette of `1 << bits` values a block.
    pub(crate) palettes: Vec<Vec<f32>>,
    /// Indices along the dimension that vectors extend, and elements from one of them to the next.
    pub(crate) size: usize,
    pub(crate) inner: usize,
}

impl Lookup {
    fn floats(&self, isa: Isa, start: usize, out: &mut [f32]) {
        let lanes = self.palettes.len();
        if lanes == 1 {
            return self.lane(isa, 0, start, out);
        }
        if self.inner == 1 {
            return self.vectors(isa, start, out);
        }
        // Rows of `inner` values, each of one lane.
        let mut at = 0;
        while at < out.len() {
            let (row, column) = ((start + at) / self.inner, (start + at) % self.inner);
            let (outer, place) = (row / (self.size * lanes), row % (self.size * lanes));
            let index = (outer * self.size + place / lanes) * self.inner + column;
            let n = (self.inner - column).min(out.len() - at);
            self.lane(isa, place % lanes, index, &mut out[at..at + n]);
            at += n;
        }
    }

    /// One lane of the vectors of indices `start..start + out.len()`.
    fn lane(&self, isa: Isa, lane: usize, start: usize, out: &mut [f32]) {
        let mut codes = [0; PIECE];
        for (i, out) in out.chunks_mut(PIECE).enumerate() {
            let start = start + i * PIECE;
            let codes = &mut codes[..out.len()];
            self.indices.codes(isa, start, codes);
            for s in self.grid.segments(start, out.len()) {
                let palettes = &self.palettes[lane][s.parameter << self.bits..];
                let (codes, out) = (&codes[s.at.clone()], &mut out[s.at]);
                rows::lookup(isa, self.bits, codes, palettes, self.grid.block(), s.skip, out);
            }
        }
    }

    /// Vectors side by side.
    fn vectors(&self, isa: Isa, start: usize, out: &mut [f32]) {
        let lanes = self.palettes.len();
        let (first, last) = (start / lanes, (start + out.len()).div_ceil(lanes));
        let mut values = [0.0; PIECE];
        for piece in (first..last).step_by(PIECE) {
            let values = &mut values[..PIECE.min(last - piece)];
            let from = (piece * lanes).checked_sub(start);
            let whole = from.and_then(|from| out.get_mut(from..from + values.len() * lanes));
            match whole {
                Some(vectors) => {
                    for lane in 0..lanes {
                        self.lane(isa, lane, piece, values);
                        for (vector, v) in vectors.chunks_exact_mut(lanes).zip(&*values) {
                            vector[lane] = *v;
                        }
                    }
                }
                // The first or the last vector is cut.
                None => {
                    for lane in 0..lanes {
                        self.lane(isa, lane, piece, values);
                        for (i, v) in values.iter().enumerate() {
                            let to = ((piece + i) * lanes + lane).checked_sub(start);
                            if let Some(x) = to.and_then(|to| out.get_mut(to)) {
                                *x = *v;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// `(data - offset) * scale`, a scale and an offset a block.
#[derive(Clone, Debug)]
pub(crate) struct Shift {
    pub(crate) data: Box<Recipe>,
    pub(crate) grid: Grid,
    pub(crate) scales: Vec<f32>,
    pub(crate) offsets: Option<Vec<f32>>,
    /// The difference is rounded to fp16 before it is scaled.
    pub(crate) half: bool,
}

/// How a run of elements is computed.
#[derive(Clone, Debug)]
pub(crate) enum Recipe {
    Numbers(Numbers),
    Lookup(Lookup),
    Shift(Shift),
    /// Stored values go where the mask is set, 0 elsewhere.
    Scatter {
        mask: Mask,
        stored: Box<Recipe>,
    },
    /// A dense weight where the mask is set, 0 elsewhere.
    Masked {
        mask: Mask,
        dense: Box<Recipe>,
    },
}

impl Recipe {
    /// The first `count` elements of a weight of integers, which have at most eight bits.
    #[expect(clippy::cast_possible_truncation, reason = "eight bits")]
    pub(crate) fn integers(&self, count: usize) -> Vec<i32> {
        let mut values = vec![0.0; count];
        self.floats(Isa::best(), 0, &mut values);
        values.into_iter().map(|v| v as i32).collect()
    }

    /// Elements from `start` on.
    pub(crate) fn floats(&self, isa: Isa, start: usize, out: &mut [f32]) {
        match self {
            Recipe::Numbers(numbers) => numbers.floats(isa, start, out),
            Recipe::Lookup(lookup) => lookup.floats(isa, start, out),
            Recipe::Shift(shift) => {
                shift.data.floats(isa, start, out);
                let (block, half) = (shift.grid.block(), shift.half);
                for s in shift.grid.segments(start, out.len()) {
                    let offsets = shift.offsets.as_ref().map(|o| &o[s.parameter..]);
                    let scales = &shift.scales[s.parameter..];
                    rows::shift_scale(isa, &mut out[s.at], scales, offsets, block, s.skip, half);
                }
            }
            Recipe::Scatter { mask, stored } => {
                let mut values = [0.0; PIECE];
                for (i, out) in out.chunks_mut(PIECE).enumerate() {
                    let start = start + i * PIECE;
                    let from = mask.rank(start);
                    let values = &mut values[..mask.rank(start + out.len()) - from];
                    stored.floats(isa, from, values);
                    mask.spread(isa, start, values, out);
                }
            }
            Recipe::Masked { mask, dense } => {
                dense.floats(isa, start, out);
                mask.clear(isa, start, out);
            }
        }
    }

    /// Indices from `start` on; of a sparse weight, 0 where none is stored.
    fn codes(&self, isa: Isa, start: usize, out: &mut [u8]) {
        match self {
            Recipe::Numbers(numbers) => numbers.codes(isa, start, out),
            Recipe::Scatter { mask, stored } => {
                let mut codes = [0; PIECE];
                for (i, out) in out.chunks_mut(PIECE).enumerate() {
                    let start = start + i * PIECE;
                    let from = mask.rank(start);
                    let codes = &mut codes[..mask.rank(start + out.len()) - from];
                    stored.codes(isa, from, codes);
                    mask.spread_codes(isa, start, codes, out);
                }
            }
            Recipe::Lookup(_) | Recipe::Shift(_) | Recipe::Masked { .. } => {
                unreachable!("a lookup is built over numbers or stored ones")
            }
        }
    }
}
