//! One side of a hand-off: a layout, tensors with random strides, and what they hold.

use std::collections::HashMap;

use kvbaton_layout::{
    CacheSpec, DType, Encoding, LayerSpec, Layout, LiveRows, Part, Placement, Resolved, Role, Sizes,
    TensorInfo, TensorRule,
};

use crate::oracle::{Label, for_each_element, ring_start};
use crate::random::Random;
use crate::scalar::{Stored, affine_decode, affine_encode, float_bytes, int8_code, int8_scale, round};

/// A row of a cache: layer, part, head, position.
pub(crate) type RowKey = (usize, Part, usize, i64);

/// Values of every row, decoded.
pub(crate) type Content = HashMap<RowKey, Vec<f32>>;

pub(crate) struct Side {
    pub(crate) layout: Layout,
    pub(crate) live: LiveRows,
    pub(crate) infos: Vec<TensorInfo>,
}

impl Side {
    /// `layout` for a cache of `n` tokens, with sizes, strides and starts of any kind; `None` where it cannot hold
    /// such a model.
    pub(crate) fn random(
        random: &mut Random,
        layout: &Layout,
        cache: &CacheSpec,
        n: usize,
        dtype: DType,
    ) -> Option<Side> {
        let mut layout = layout.clone();
        let mut live = LiveRows::seen(n);
        let pad = random.within(0, 3);
        let block_rows = random.within(1, 4);
        let capacity = n + pad + random.within(0, 5);
        for rule in &mut layout.tensors {
            if rule.name.0.contains("{group}") {
                rule.group_layers = Some(random.within(1, 3));
            }
            if let Some(padded) = &mut rule.padded_head_dim {
                let lanes = cache.layers.iter().filter_map(LayerSpec::attention).map(|(_, k, v)| k.max(v));
                *padded = lanes.max()? + random.within(0, 3);
            }
            if rule.parts() == [Part::Conv] && rule.placement == Some(Placement::LeftPadded) {
                rule.extra_rows = pad + random.within(0, 2);
            }
        }
        let sizes = Sizes { capacity, dtype, block_rows, row_stride_bytes: None };
        let mut infos = layout.tensors(cache, &sizes).ok()?;
        live.pad = Some(pad);
        live.conv_start = Some(random.within(0, 1));
        let from = used(&layout, Placement::RingFrom);
        live.ring_start = match cache.layers.iter().find_map(LayerSpec::window) {
            _ if from => Some(random.within(0, capacity.min(window_of(cache).unwrap_or(capacity)) - 1)),
            Some(window) => ring_start(window.size, window.keep, n),
            None => None,
        };
        let paged_by_cell = layout
            .tensors
            .iter()
            .any(|r| r.axes.has(kvbaton_layout::Axis::Block) && !r.axes.has(kvbaton_layout::Axis::Row));
        let blocks = if paged_by_cell { capacity } else { capacity.div_ceil(block_rows) };
        live.block_table = Some(random.shuffled(blocks).into_iter().map(|b| b as u32).collect());
        for info in &mut infos {
            stretch(random, info);
        }
        let side = Side { layout, live, infos };
        side.layout.resolve(cache, &side.infos, &side.live).ok().map(|_| side)
    }

    pub(crate) fn resolved(&self, cache: &CacheSpec) -> Resolved {
        self.layout.resolve(cache, &self.infos, &self.live).expect("checked in `random`")
    }

    /// Buffers of the tensors, every byte `fill`.
    pub(crate) fn buffers(&self, fill: u8) -> Vec<Vec<u8>> {
        self.infos.iter().map(|t| vec![fill; t.len_bytes]).collect()
    }

    /// The type of the scales of a part of a layer, or of its elements.
    fn dtype_of(
        &self,
        rule: &TensorRule,
        infos: &HashMap<(usize, Part, Role), DType>,
        key: (usize, Part),
    ) -> DType {
        let role = if rule.encoding == Encoding::Plain { Role::Elements } else { Role::Scale };
        infos[&(key.0, key.1, role)]
    }

    fn dtypes(&self, cache: &CacheSpec) -> HashMap<(usize, Part, Role), DType> {
        let mut dtypes = HashMap::new();
        for_each_element(&self.layout, cache, &self.live, &self.infos, |rule, tensor, _, label| {
            if let Label::Live(cell) = label {
                dtypes.insert((cell.layer, cell.part, rule.role), self.infos[tensor].dtype);
            }
        });
        dtypes
    }

    /// Fills the tensors with random rows and says what they hold. Codes are those of random values.
    pub(crate) fn fill(
        &self,
        random: &mut Random,
        cache: &CacheSpec,
        buffers: &mut [Vec<u8>],
    ) -> (Content, HashMap<RowKey, Stored>) {
        let dtypes = self.dtypes(cache);
        let mut raw: Content = HashMap::new();
        for_each_element(&self.layout, cache, &self.live, &self.infos, |rule, _, _, label| {
            if let (Label::Live(cell), Role::Elements) = (label, rule.role) {
                let lanes = raw.entry((cell.layer, cell.part, cell.head, cell.row)).or_default();
                let count = rule.encoding.lanes(cell.lane + 1);
                while lanes.len() < count {
                    lanes.push(random.value());
                }
            }
        });
        let (mut content, mut stored) = (HashMap::new(), HashMap::new());
        for_each_element(&self.layout, cache, &self.live, &self.infos, |rule, _, _, label| {
            let Label::Live(cell) = label else { return };
            let key = (cell.layer, cell.part, cell.head, cell.row);
            if rule.role != Role::Elements || content.contains_key(&key) {
                return;
            }
            let dtype = self.dtype_of(rule, &dtypes, (cell.layer, cell.part));
            let encoded = encode(rule.encoding, &raw, key, dtype);
            content.insert(key, decode(rule.encoding, &encoded, &raw[&key], dtype));
            stored.insert(key, encoded);
        });
        self.write(cache, &content, &stored, buffers, |_| None);
        (content, stored)
    }

    /// Writes what the tensors should hold: rows of `content`, zeros where it has none and in padding.
    ///
    /// `same` gives the codes of a row that move as they are.
    pub(crate) fn expect<'a>(
        &self,
        cache: &CacheSpec,
        content: &Content,
        buffers: &mut [Vec<u8>],
        same: impl Fn(RowKey, Encoding) -> Option<&'a Stored>,
    ) {
        let dtypes = self.dtypes(cache);
        let mut stored = HashMap::new();
        for_each_element(&self.layout, cache, &self.live, &self.infos, |rule, _, _, label| {
            let Label::Live(cell) = label else { return };
            let key = (cell.layer, cell.part, cell.head, cell.row);
            if rule.role == Role::Elements && content.contains_key(&key) && !stored.contains_key(&key) {
                let dtype = self.dtype_of(rule, &dtypes, (cell.layer, cell.part));
                let codes = same(key, rule.encoding).cloned();
                stored.insert(key, codes.unwrap_or_else(|| encode(rule.encoding, content, key, dtype)));
            }
        });
        self.write(cache, content, &stored, buffers, |size| Some(vec![0; size]));
    }

    fn write(
        &self,
        cache: &CacheSpec,
        content: &Content,
        stored: &HashMap<RowKey, Stored>,
        buffers: &mut [Vec<u8>],
        padding: impl Fn(usize) -> Option<Vec<u8>>,
    ) {
        for_each_element(&self.layout, cache, &self.live, &self.infos, |rule, tensor, at, label| {
            let dtype = self.infos[tensor].dtype;
            let bytes = match label {
                Label::Dead => None,
                Label::Padding => padding(dtype.size_bytes()),
                Label::Live(cell) => {
                    let key = (cell.layer, cell.part, cell.head, cell.row);
                    let row = stored.get(&key).or_else(|| {
                        // A scale that heads share is found under any of them.
                        stored.get(&(cell.layer, cell.part, 0, cell.row))
                    });
                    match row {
                        None => padding(dtype.size_bytes()),
                        Some(row) => Some(match (rule.role, rule.encoding) {
                            (Role::Elements, Encoding::Plain) => float_bytes(content[&key][cell.lane], dtype),
                            (Role::Elements, Encoding::Affine { .. }) => {
                                row.codes[cell.lane].to_le_bytes().to_vec()
                            }
                            (Role::Elements, _) => vec![row.codes[cell.lane] as u8],
                            (Role::Scale, _) => float_bytes(row.scales[cell.lane], dtype),
                            (Role::Bias, _) => float_bytes(row.biases[cell.lane], dtype),
                        }),
                    }
                }
            };
            if let Some(bytes) = bytes {
                buffers[tensor][at..at + bytes.len()].copy_from_slice(&bytes);
            }
        });
    }
}

fn used(layout: &Layout, placement: Placement) -> bool {
    layout.placement == placement || layout.sliding_placement == Some(placement)
}

fn window_of(cache: &CacheSpec) -> Option<usize> {
    cache.layers.iter().filter_map(LayerSpec::window).map(|w| w.size).min()
}

/// The row `key` of `content`, encoded by definition.
fn encode(encoding: Encoding, content: &Content, key: RowKey, dtype: DType) -> Stored {
    let row = &content[&key];
    let int8 = |scale: f32| Stored {
        codes: row.iter().map(|v| int8_code(*v, scale) as u8 as u32).collect(),
        scales: vec![scale],
        biases: Vec::new(),
    };
    match encoding {
        Encoding::Plain => Stored::default(),
        Encoding::Affine { bits, group_size } => affine_encode(row, bits.into(), group_size, dtype),
        Encoding::Int8PerTokenHead => int8(int8_scale(row.iter().copied(), dtype)),
        Encoding::Int8PerToken => {
            let (layer, part, _, position) = key;
            let heads = (0..).map_while(|head| content.get(&(layer, part, head, position)));
            int8(int8_scale(heads.flatten().copied(), dtype))
        }
    }
}

/// What a stored row means.
fn decode(encoding: Encoding, stored: &Stored, raw: &[f32], dtype: DType) -> Vec<f32> {
    match encoding {
        Encoding::Plain => raw.iter().map(|v| round(*v, dtype)).collect(),
        Encoding::Affine { bits, group_size } => affine_decode(stored, bits.into(), group_size, dtype),
        _ => stored.codes.iter().map(|&c| f32::from(c as u8 as i8) * stored.scales[0]).collect(),
    }
}

/// Gives a tensor strides in any order, with gaps.
fn stretch(random: &mut Random, info: &mut TensorInfo) {
    let size = info.dtype.size_bytes();
    let order = if random.within(0, 2) == 0 {
        random.shuffled(info.shape.len())
    } else {
        (0..info.shape.len()).rev().collect()
    };
    let mut span = size;
    for axis in order {
        info.strides_bytes[axis] = span;
        span = span * info.shape[axis] + size * random.pick(&[0, 0, 0, 1, 3]);
    }
    info.len_bytes = span;
}
