//! What every element of every tensor is, by the words of a layout: no strides, no runs, no blocks.
//!
//! Slots are found by writing tokens one after the other, as the system of the placement does.

use kvbaton_layout::{
    Axis, CacheSpec, Encoding, LayerSet, LayerSpec, Layout, LiveRows, Part, Placement, Role, TensorInfo,
    TensorRule,
};

/// A cell of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cell {
    pub(crate) layer: usize,
    pub(crate) part: Part,
    pub(crate) head: usize,
    pub(crate) row: i64,
    /// In stored elements.
    pub(crate) lane: usize,
}

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Label {
    Live(Cell),
    /// A lane that pads a live row.
    Padding,
    Dead,
}

/// A tensor of a rule.
struct Held {
    name: String,
    layers: Vec<usize>,
    head: Option<usize>,
    parts: Vec<Part>,
}

/// Calls `each` with the rule, the tensor and the label of every element of every tensor.
pub(crate) fn for_each_element(
    layout: &Layout,
    cache: &CacheSpec,
    live: &LiveRows,
    infos: &[TensorInfo],
    mut each: impl FnMut(&TensorRule, usize, usize, Label),
) {
    for rule in &layout.tensors {
        for held in held(rule, cache) {
            let number = infos.iter().position(|t| t.name == held.name).expect("every named tensor is there");
            let info = &infos[number];
            if info.shape.contains(&0) {
                continue;
            }
            let reader = Reader::new(layout, rule, &held, cache, live, info);
            let mut index = vec![0; info.shape.len()];
            'elements: loop {
                let at: usize = index.iter().zip(&info.strides_bytes).map(|(i, s)| i * s).sum();
                each(rule, number, at, reader.label(&index));
                for axis in (0..index.len()).rev() {
                    index[axis] += 1;
                    if index[axis] < info.shape[axis] {
                        continue 'elements;
                    }
                    index[axis] = 0;
                }
                break;
            }
        }
    }
}

fn held(rule: &TensorRule, cache: &CacheSpec) -> Vec<Held> {
    let keeps = |spec: &LayerSpec| match rule.parts()[0] {
        Part::Key | Part::Value => matches!(spec, LayerSpec::Full { .. } | LayerSpec::Sliding { .. }),
        Part::Conv | Part::State => matches!(spec, LayerSpec::Recurrent { .. }),
    };
    let in_set = |layer: usize, spec: &LayerSpec| match &rule.layers {
        LayerSet::All => true,
        LayerSet::Full => matches!(spec, LayerSpec::Full { .. }),
        LayerSet::Sliding => matches!(spec, LayerSpec::Sliding { .. }),
        LayerSet::Recurrent => matches!(spec, LayerSpec::Recurrent { .. }),
        LayerSet::List(list) => list.contains(&layer),
    };
    let layers: Vec<usize> =
        (0..cache.layers.len()).filter(|&l| keeps(&cache.layers[l]) && in_set(l, &cache.layers[l])).collect();
    let template = &rule.name.0;
    let apart = template.contains("{layer}") || template.contains("{index}");
    let size = if apart { 1 } else { rule.group_layers.unwrap_or(usize::MAX) };
    let mut all = Vec::new();
    for (number, group) in layers.chunks(size.min(layers.len().max(1))).enumerate() {
        let heads = match &cache.layers[group[0]] {
            LayerSpec::Full { kv_heads, .. } | LayerSpec::Sliding { kv_heads, .. } => *kv_heads,
            _ => 1,
        };
        let heads: Vec<Option<usize>> =
            if template.contains("{kv_head}") { (0..heads).map(Some).collect() } else { vec![None] };
        for head in heads {
            let name = template
                .replace("{layer}", &group[0].to_string())
                .replace("{index}", &number.to_string())
                .replace("{group}", &number.to_string())
                .replace("{kv_head}", &head.unwrap_or(0).to_string());
            match name.split_once('|') {
                None => all.push(Held { name, layers: group.to_vec(), head, parts: rule.parts().to_vec() }),
                Some((key, value)) => {
                    let (before, key) = key.split_once('{').expect("alternatives are in braces");
                    let (value, after) = value.split_once('}').expect("alternatives are in braces");
                    for (word, part) in [(key, Part::Key), (value, Part::Value)] {
                        let name = format!("{before}{word}{after}");
                        all.push(Held { name, layers: group.to_vec(), head, parts: vec![part] });
                    }
                }
            }
        }
    }
    all
}

/// Size and kept rows of a window.
type WindowOf = Option<(usize, usize)>;

/// (heads, key lanes, value lanes, window)
fn attention(spec: &LayerSpec) -> Option<(usize, usize, usize, WindowOf)> {
    match *spec {
        LayerSpec::Full { kv_heads, key_dim, value_dim } => Some((kv_heads, key_dim, value_dim, None)),
        LayerSpec::Sliding { kv_heads, key_dim, value_dim, window } => {
            Some((kv_heads, key_dim, value_dim, Some((window.size, window.keep))))
        }
        _ => None,
    }
}

fn stored(rule: &TensorRule, lanes: usize) -> usize {
    match (rule.encoding, rule.role) {
        (Encoding::Affine { bits, .. }, Role::Elements) => lanes * usize::from(bits) / 32,
        (Encoding::Affine { group_size, .. }, _) => lanes / group_size,
        (_, Role::Elements) => lanes,
        _ => 1,
    }
}

/// A tensor's axes and, for each of its layers and parts, the token in every slot.
struct Reader<'a> {
    rule: &'a TensorRule,
    held: &'a Held,
    cache: &'a CacheSpec,
    /// Axes and their sizes, dimension by dimension.
    axes: Vec<Vec<(Axis, usize)>>,
    slots: Vec<Vec<Option<i64>>>,
    rows: usize,
}

impl<'a> Reader<'a> {
    fn new(
        layout: &Layout,
        rule: &'a TensorRule,
        held: &'a Held,
        cache: &'a CacheSpec,
        live: &LiveRows,
        info: &TensorInfo,
    ) -> Reader<'a> {
        let first = &cache.layers[held.layers[0]];
        let key_first = held.parts[0] == Part::Key;
        let size_of = |axis: Axis| match (axis, first) {
            (Axis::Layer, _) => Some(held.layers.len()),
            (Axis::Part, _) => Some(held.parts.len()),
            (Axis::Batch, _) => Some(1),
            (Axis::KvHead, LayerSpec::Recurrent { heads, .. }) => Some(*heads),
            (Axis::KvHead, spec) => attention(spec).map(|a| a.0),
            (Axis::HeadDim, spec) => rule
                .padded_head_dim
                .or(attention(spec).map(|(_, key, value, _)| if key_first { key } else { value }))
                .map(|lanes| stored(rule, lanes)),
            (Axis::Channel, LayerSpec::Recurrent { conv_channels, .. }) => Some(*conv_channels),
            (Axis::ValueDim, LayerSpec::Recurrent { value_dim, .. }) => Some(*value_dim),
            (Axis::KeyDim, LayerSpec::Recurrent { key_dim, .. }) => Some(*key_dim),
            _ => None,
        };
        let mut axes = Vec::new();
        let (mut rows, mut blocks) = (1, 1);
        for (dimension, &shape) in rule.axes.dimensions().iter().zip(&info.shape) {
            let known: usize = dimension.0.iter().filter_map(|&a| size_of(a)).product();
            let sized: Vec<(Axis, usize)> =
                dimension.0.iter().map(|&a| (a, size_of(a).unwrap_or(shape / known))).collect();
            for (axis, size) in &sized {
                match axis {
                    Axis::Row => rows = *size,
                    Axis::Block => blocks = *size,
                    _ => {}
                }
            }
            axes.push(sized);
        }
        let slots = held.layers.iter().map(|&layer| match (&cache.layers[layer], held.parts[0]) {
            (_, Part::State) => Vec::new(),
            (LayerSpec::Recurrent { conv_steps, .. }, _) => {
                conv_slots(rule.placement, rows, *conv_steps, live)
            }
            (spec, _) => {
                let window = attention(spec).expect("keys and values are attention's").3;
                let own = match window {
                    Some(_) => rule.sliding_placement.or(rule.placement).or(layout.sliding_placement),
                    None => rule.placement,
                };
                slots(own.unwrap_or(layout.placement), rows, blocks, window, live)
            }
        });
        Reader { rule, held, cache, slots: slots.collect(), axes, rows }
    }

    fn label(&self, index: &[usize]) -> Label {
        let mut at = [0; 16];
        for (dimension, &i) in self.axes.iter().zip(index) {
            let mut rest = i;
            for &(axis, size) in dimension.iter().rev() {
                at[axis as usize] = rest % size;
                rest /= size;
            }
        }
        let get = |axis: Axis| at[axis as usize];
        let layer = self.held.layers[get(Axis::Layer)];
        let part = self.held.parts[get(Axis::Part)];
        let head = self.held.head.unwrap_or(get(Axis::KvHead));
        let cell = |row: i64, lane: usize| Label::Live(Cell { layer, part, head, row, lane });
        if part == Part::State {
            return cell(get(Axis::ValueDim) as i64, get(Axis::KeyDim));
        }
        let slot = get(Axis::Block) * self.rows + get(Axis::Row);
        let Some(row) = self.slots[get(Axis::Layer)][slot] else { return Label::Dead };
        if part == Part::Conv {
            return cell(row, get(Axis::Channel));
        }
        let (_, key, value, _) =
            attention(&self.cache.layers[layer]).expect("keys and values are attention's");
        let lanes = stored(self.rule, if part == Part::Key { key } else { value });
        if get(Axis::HeadDim) >= lanes { Label::Padding } else { cell(row, get(Axis::HeadDim)) }
    }
}

/// The token in every slot, after all were written in turn.
fn slots(
    placement: Placement,
    rows: usize,
    blocks: usize,
    window: WindowOf,
    live: &LiveRows,
) -> Vec<Option<i64>> {
    let capacity = rows * blocks;
    let mut buffer: Vec<Option<i64>> = vec![None; capacity];
    let tokens = (live.tokens_seen - live.live.unwrap_or(live.tokens_seen))..live.tokens_seen;
    let mut index = 0;
    for (count, token) in tokens.enumerate() {
        let slot = match placement {
            Placement::Left => count,
            Placement::Right => {
                buffer.rotate_left(1);
                capacity - 1
            }
            Placement::LeftPadded => live.pad.unwrap() + count,
            Placement::Ring => token % capacity,
            Placement::RingFrom => {
                // Written backwards from the stated end: the oldest of those that fit starts there.
                let dropped = live.tokens_seen.saturating_sub(capacity);
                if token < dropped {
                    continue;
                }
                (live.ring_start.unwrap() + token - dropped) % capacity
            }
            Placement::RingIndexed => {
                if index == capacity {
                    index = window.map_or(0, |(_, keep)| keep);
                }
                index += 1;
                index - 1
            }
            Placement::Paged => {
                live.block_table.as_ref().unwrap()[count / rows] as usize * rows + count % rows
            }
        };
        buffer[slot] = Some(token as i64);
    }
    // A window attends to the rows that stay and to the newest of the others.
    if let Some((size, keep)) = window.filter(|(size, _)| live.tokens_seen > *size) {
        let newest = (live.tokens_seen - (size - keep)) as i64;
        for slot in &mut buffer {
            *slot = slot.filter(|&row| row >= newest || row < keep as i64);
        }
    }
    buffer
}

fn conv_slots(placement: Option<Placement>, slots: usize, steps: usize, live: &LiveRows) -> Vec<Option<i64>> {
    let mut buffer = vec![None; slots];
    for step in 0..steps {
        let row = live.tokens_seen as i64 - steps as i64 + step as i64;
        let slot = match placement.unwrap_or(Placement::Left) {
            Placement::Left => step,
            Placement::Right => slots - steps + step,
            Placement::LeftPadded => live.pad.unwrap() + step,
            Placement::Ring => row.rem_euclid(slots as i64) as usize,
            Placement::RingFrom => (live.conv_start.unwrap() + step) % slots,
            other => panic!("{other:?} is not a convolution state's"),
        };
        buffer[slot] = Some(row);
    }
    buffer
}

/// The slot that `RotatingKVCache` would overwrite next, once it is full.
pub(crate) fn ring_start(size: usize, keep: usize, tokens_seen: usize) -> Option<usize> {
    (tokens_seen >= size).then(|| {
        let mut index = 0;
        for _ in 0..tokens_seen {
            if index == size {
                index = keep;
            }
            index += 1;
        }
        if index == size { keep } else { index }
    })
}
