//! What a plan is made of: boxes of elements that move, rows that are coded anew, boxes that are zeroed.

use std::ops::Range;

use kvbaton_layout::{DType, Encoding, Part, Role};

/// One side of a copy: where its first element is and how to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the tensor.
    pub tensor: usize,
    /// The first element.
    pub offset_bytes: usize,
    /// Strides along the three axes of the box.
    pub strides_bytes: [usize; 3],
    /// Type of the elements.
    pub dtype: DType,
}

impl Place {
    /// One past the last byte of a box of `extents`.
    pub fn end_bytes(&self, extents: [usize; 3]) -> usize {
        let reach: usize = extents.iter().zip(self.strides_bytes).map(|(n, s)| n.saturating_sub(1) * s).sum();
        self.offset_bytes + reach + self.dtype.size_bytes()
    }
}

/// One copy: a box of up to three axes, from one tensor to another. Elements move as they are or change their
/// float type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// The layer it belongs to.
    pub layer: usize,
    /// What it moves.
    pub part: Part,
    /// Elements, or the scales or biases of elements whose codes move unchanged.
    pub role: Role,
    /// Heads, rows and lanes it moves, as the model counts them.
    pub heads: Range<usize>,
    /// Positions of the rows.
    pub rows: Range<i64>,
    /// Lanes, in stored elements.
    pub lanes: Range<usize>,
    /// Elements along the three axes after merging; an axis that was merged away has 1.
    pub extents: [usize; 3],
    /// Where they come from.
    pub src: Place,
    /// Where they go.
    pub dst: Place,
}

impl CopyOp {
    /// Elements that move.
    pub fn elements(&self) -> usize {
        self.extents.iter().product()
    }

    /// The (head, row position, lane) of the element at `index` of the merged box.
    pub fn place_of(&self, index: [usize; 3]) -> (usize, i64, usize) {
        let linear = (index[0] * self.extents[1] + index[1]) * self.extents[2] + index[2];
        let (lanes, rows) = (self.lanes.len(), (self.rows.end - self.rows.start).unsigned_abs() as usize);
        let row = i64::try_from(linear / lanes % rows).unwrap_or(0);
        (self.heads.start + linear / lanes / rows, self.rows.start + row, self.lanes.start + linear % lanes)
    }

    /// Bytes that lie side by side on both sides.
    pub fn run_bytes(&self) -> usize {
        let packed = |p: &Place| self.extents[2] == 1 || p.strides_bytes[2] == p.dtype.size_bytes();
        let lanes = if packed(&self.src) && packed(&self.dst) { self.extents[2] } else { 1 };
        lanes * self.src.dtype.size_bytes().min(self.dst.dtype.size_bytes())
    }

    /// Merges axes that are contiguous on both sides. Row-major order of the elements is kept.
    pub(crate) fn merge(&mut self) {
        for outer in [1, 0] {
            let inner = if outer == 1 || self.extents[1] > 1 { outer + 1 } else { 2 };
            let joins = |p: &Place, e: &[usize; 3]| {
                e[outer] == 1 || p.strides_bytes[outer] == e[inner] * p.strides_bytes[inner]
            };
            // A single element has no stride of its own and takes the outer axis's.
            if self.extents[inner] == 1 && self.extents[outer] > 1 {
                self.extents.swap(outer, inner);
                self.src.strides_bytes.swap(outer, inner);
                self.dst.strides_bytes.swap(outer, inner);
            } else if joins(&self.src, &self.extents) && joins(&self.dst, &self.extents) {
                self.extents[inner] *= self.extents[outer];
                self.extents[outer] = 1;
            }
        }
    }
}

/// One side of a copy that codes rows anew: elements or codes, and what their encoding keeps beside them.
///
/// Strides run along heads, rows and stored elements; those of a scale that all heads of a row share are 0 along
/// heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// How the elements are encoded.
    pub encoding: Encoding,
    /// The elements.
    pub elements: Place,
    /// Their scales.
    pub scale: Option<Place>,
    /// Their biases.
    pub bias: Option<Place>,
}

/// Some heads of the source of a [`CodedOp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodedSource {
    /// The heads.
    pub heads: Range<usize>,
    /// Where they are.
    pub coded: Coded,
}

/// Rows that are decoded, encoded, or both.
///
/// The meaning, row by row: the source's lanes are decoded to float32 (affine codes first to the type of their
/// scales, as MLX does); then they are rounded to the target's type, or to the type of its affine scales, and
/// encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodedOp {
    /// The layer.
    pub layer: usize,
    /// Keys or values.
    pub part: Part,
    /// Heads.
    pub heads: Range<usize>,
    /// Positions of the rows.
    pub rows: Range<i64>,
    /// Lanes of a head, decoded.
    pub lanes: usize,
    /// Where they come from; together all of `heads`, each once.
    pub sources: Vec<CodedSource>,
    /// Where they go.
    pub dst: Coded,
}

impl CodedOp {
    /// Rows.
    pub fn row_count(&self) -> usize {
        (self.rows.end - self.rows.start).unsigned_abs() as usize
    }

    /// The places of one side with the extents that `heads` heads and `rows` rows have there.
    pub fn boxes(
        &self,
        side: &Coded,
        heads: usize,
        rows: usize,
    ) -> impl Iterator<Item = (Role, Place, [usize; 3])> {
        let (lanes, encoding) = (self.lanes, side.encoding);
        let places =
            [(Role::Elements, Some(side.elements)), (Role::Scale, side.scale), (Role::Bias, side.bias)];
        places.into_iter().filter_map(move |(role, place)| {
            // A scale that heads share is one box of one head.
            let shared = role != Role::Elements && encoding == Encoding::Int8PerToken;
            let heads = if shared { 1 } else { heads };
            Some((role, place?, [heads, rows, encoding.stored_elements(role, lanes)]))
        })
    }

    /// Bytes that one side has for `heads` heads.
    pub fn side_bytes(&self, side: &Coded, heads: usize) -> usize {
        self.boxes(side, heads, self.row_count())
            .map(|(_, place, extents)| extents.iter().product::<usize>() * place.dtype.size_bytes())
            .sum()
    }
}

/// Elements of the target that must read as zero: rows that no source row covers and no later token attends to,
/// and the lanes that pad a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroOp {
    /// The layer it belongs to.
    pub layer: usize,
    /// What it would have held.
    pub part: Part,
    /// Positions of the rows.
    pub rows: Range<i64>,
    /// Elements along heads, rows and lanes.
    pub extents: [usize; 3],
    /// Where they are.
    pub dst: Place,
}
