//! Live rows, read one element at a time.
//!
//! This is the definition that a hand-off is checked against: strides and codes are followed as they are written
//! down, and nothing is shared with the planner or the kernels that did the hand-off.

use std::collections::BTreeMap;

use half::{bf16, f16};
use kvbaton_layout::{Block, DType, Encoding, LayerSpec, Part, Resolved, Role, Window};

use crate::{CacheView, Error, ErrorKind};

/// One part of one layer: `[head, row, lane]` values, decoded.
#[derive(Clone, Debug)]
pub(crate) struct PartRows {
    pub(crate) heads: usize,
    /// Positions of the rows, ascending.
    pub(crate) rows: Vec<i64>,
    pub(crate) lanes: usize,
    /// Type of the elements; of codes, that of their scales.
    pub(crate) dtype: DType,
    pub(crate) encoding: Encoding,
    pub(crate) values: Vec<f32>,
}

impl PartRows {
    /// The lanes of one head of the row at index `at`.
    pub(crate) fn row(&self, head: usize, at: usize) -> &[f32] {
        let start = (head * self.rows.len() + at) * self.lanes;
        &self.values[start..start + self.lanes]
    }

    /// All rows of one head.
    pub(crate) fn head(&self, head: usize) -> &[f32] {
        let len = self.rows.len() * self.lanes;
        &self.values[head * len..(head + 1) * len]
    }

    /// Where the row at `position` is.
    pub(crate) fn index(&self, position: i64) -> Option<usize> {
        self.rows.binary_search(&position).ok()
    }

    /// Only the rows at `positions`, all of which are held.
    pub(crate) fn at(&self, positions: &[i64]) -> PartRows {
        let mut values = Vec::with_capacity(self.heads * positions.len() * self.lanes);
        for head in 0..self.heads {
            for at in positions.iter().filter_map(|p| self.index(*p)) {
                values.extend_from_slice(self.row(head, at));
            }
        }
        PartRows { rows: positions.to_vec(), values, ..*self }
    }
}

/// The parts that a layer may keep.
pub(crate) fn parts(spec: &LayerSpec) -> [Part; 2] {
    if spec.attention().is_some() { [Part::Key, Part::Value] } else { [Part::Conv, Part::State] }
}

/// Numbers of the layers that keep something, in order.
pub(crate) fn kept(view: &CacheView) -> Vec<usize> {
    let layers = view.cache().layers.iter().enumerate();
    layers.filter(|(_, l)| !matches!(l, LayerSpec::Shared { .. })).map(|(i, _)| i).collect()
}

/// Whether the token after the first `tokens_seen` reads row `position`. It takes a place of the window itself.
pub(crate) fn attended(window: Option<Window>, tokens_seen: usize, position: i64) -> bool {
    let Some(window) = window else { return true };
    let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let moving = signed(window.size.saturating_sub(window.keep));
    position < signed(window.keep) || position > signed(tokens_seen) - moving
}

/// A cache whose blocks are known, to be read part by part.
pub(crate) struct Reader<'a> {
    resolved: Resolved,
    bytes: Vec<&'a [u8]>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(view: &'a CacheView) -> Result<Reader<'a>, Error> {
        Ok(Reader { resolved: view.resolve()?, bytes: view.bytes() })
    }

    /// One part of one layer; `None` where no row of it is live.
    pub(crate) fn read(&self, layer: usize, part: Part) -> Result<Option<PartRows>, Error> {
        let blocks = |role| self.resolved.part(layer, part).filter(move |b| b.role == role);
        let Some(first) = blocks(Role::Elements).next() else { return Ok(None) };
        let heads = blocks(Role::Elements).map(|b| b.heads.end).max().unwrap_or(0);
        let mut rows: Vec<i64> = blocks(Role::Elements).flat_map(|b| b.rows.clone()).collect();
        rows.sort_unstable();
        rows.dedup();
        let lanes = blocks(Role::Elements).map(|b| b.encoding.lanes(b.lanes.end)).max().unwrap_or(0);
        let scales = self.companions(blocks(Role::Scale));
        let biases = self.companions(blocks(Role::Bias));
        let dtype = blocks(Role::Scale).next().map_or(first.dtype, |b| b.dtype);
        let mut values = vec![0.0; heads * rows.len() * lanes];
        for block in blocks(Role::Elements) {
            let place = Place { block, lanes, count: rows.len() };
            for (head, position) in pairs(block) {
                let at = rows.binary_search(&position).unwrap_or(0);
                let key = |group: usize| (head, position, group);
                let missing = |what: &str| {
                    let message = format!("layer {layer} has codes without {what} at row {position}");
                    Error::new(ErrorKind::Layout, message)
                };
                match block.encoding {
                    Encoding::Plain => self.plain(&place, head, position, at, &mut values),
                    Encoding::Int8PerToken | Encoding::Int8PerTokenHead => {
                        let scale = scales.get(&key(0)).or_else(|| scales.get(&(0, position, 0)));
                        let scale = *scale.ok_or_else(|| missing("a scale"))?;
                        self.plain(&place, head, position, at, &mut values);
                        place.lanes_of(head, at, &mut values).iter_mut().for_each(|v| *v *= scale);
                    }
                    Encoding::Affine { bits, group_size } => {
                        for (lane, value) in place.lanes_of(head, at, &mut values).iter_mut().enumerate() {
                            let key = key(lane / group_size);
                            let scale = scales.get(&key).ok_or_else(|| missing("scales"))?;
                            let bias = biases.get(&key).ok_or_else(|| missing("biases"))?;
                            let code = self.code(block, head, position, lane, usize::from(bits));
                            // MLX rounds the product before it adds the bias.
                            *value = round(round(code * scale, dtype) + bias, dtype);
                        }
                    }
                }
            }
        }
        Ok(Some(PartRows { heads, rows, lanes, dtype, encoding: first.encoding, values }))
    }

    fn plain(&self, place: &Place<'_>, head: usize, position: i64, at: usize, values: &mut [f32]) {
        let block = place.block;
        let start = first_byte(block, head, position);
        let bytes = self.bytes[block.tensor];
        let lanes = &mut place.lanes_of(head, at, values)[block.lanes.clone()];
        for (lane, value) in lanes.iter_mut().enumerate() {
            *value = element(bytes, start + lane * block.strides_bytes[2], block.dtype);
        }
    }

    /// Scales or biases by head, row and group.
    fn companions<'b>(&self, blocks: impl Iterator<Item = &'b Block>) -> BTreeMap<(usize, i64, usize), f32> {
        let mut found = BTreeMap::new();
        for block in blocks {
            for (head, position) in pairs(block) {
                let start = first_byte(block, head, position);
                for group in block.lanes.clone() {
                    let at = start + (group - block.lanes.start) * block.strides_bytes[2];
                    found.insert((head, position, group), element(self.bytes[block.tensor], at, block.dtype));
                }
            }
        }
        found
    }

    /// The code of a lane: `bits` bits of the row's words, from the low bit upwards.
    fn code(&self, block: &Block, head: usize, position: i64, lane: usize, bits: usize) -> f32 {
        let start = first_byte(block, head, position);
        let bytes = self.bytes[block.tensor];
        let bit = |n: usize| {
            let at = start + (n / 32) * block.strides_bytes[2] + (n % 32) / 8;
            u16::from(bytes[at] >> (n % 8) & 1)
        };
        let code = (0..bits).fold(0_u16, |code, n| code | bit(lane * bits + n) << n);
        f32::from(code)
    }
}

/// Where a block's rows go.
struct Place<'a> {
    block: &'a Block,
    lanes: usize,
    count: usize,
}

impl Place<'_> {
    fn lanes_of<'v>(&self, head: usize, at: usize, values: &'v mut [f32]) -> &'v mut [f32] {
        let start = (head * self.count + at) * self.lanes;
        &mut values[start..start + self.lanes]
    }
}

/// Every head and position of a block.
fn pairs(block: &Block) -> impl Iterator<Item = (usize, i64)> + use<> {
    let (heads, rows) = (block.heads.clone(), block.rows.clone());
    heads.flat_map(move |head| rows.clone().map(move |row| (head, row)))
}

fn first_byte(block: &Block, head: usize, position: i64) -> usize {
    let down = usize::try_from(position - block.rows.start).unwrap_or(0);
    block.offset_bytes + (head - block.heads.start) * block.strides_bytes[0] + down * block.strides_bytes[1]
}

fn element(bytes: &[u8], at: usize, dtype: DType) -> f32 {
    let two = || [bytes[at], bytes[at + 1]];
    match dtype {
        DType::Float16 => f16::from_ne_bytes(two()).to_f32(),
        DType::BFloat16 => bf16::from_ne_bytes(two()).to_f32(),
        DType::Int8 => f32::from(bytes[at].cast_signed()),
        _ => f32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
    }
}

/// A value as `dtype` holds it: to nearest, ties to even.
pub(crate) fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Float16 => f16::from_f32(value).to_f32(),
        DType::BFloat16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// The bits of a value in `dtype`; all NaN are one.
pub(crate) fn bits(value: f32, dtype: DType) -> u32 {
    match dtype {
        _ if value.is_nan() => u32::MAX,
        DType::Float16 => u32::from(f16::from_f32(value).to_bits()),
        DType::BFloat16 => u32::from(bf16::from_f32(value).to_bits()),
        _ => value.to_bits(),
    }
}
