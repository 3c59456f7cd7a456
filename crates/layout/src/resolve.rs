//! From rules to bytes: a layout, a model, tensors and live rows become affine blocks.

use std::ops::Range;

use crate::live::LiveRows;
use crate::{
    Axis, CacheSpec, DType, Encoding, LayerSet, LayerSpec, Layout, LayoutError, Part, Placement, Role,
};
use crate::{TensorRule, Window};

/// A tensor as its producer describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<usize>,
    /// Bytes from one element to the next along each dimension. 0 repeats; more than packed is padding.
    pub strides_bytes: Vec<usize>,
    /// Bytes that may be accessed from the first element on.
    pub len_bytes: usize,
}

impl TensorInfo {
    /// A packed row-major tensor.
    pub fn contiguous(name: impl Into<String>, dtype: DType, shape: &[usize]) -> TensorInfo {
        let strides_bytes = contiguous_strides(shape, dtype);
        let len_bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        TensorInfo { name: name.into(), dtype, shape: shape.to_vec(), strides_bytes, len_bytes }
    }

    /// Whether distinct elements have distinct bytes: every stride steps over all that lies below it.
    fn is_injective(&self) -> bool {
        let mut axes: Vec<(usize, usize)> = self
            .shape
            .iter()
            .zip(&self.strides_bytes)
            .filter(|(n, _)| **n > 1)
            .map(|(n, s)| (*s, *n))
            .collect();
        axes.sort_unstable();
        let mut span = self.dtype.size_bytes();
        axes.into_iter().all(|(stride, n)| {
            let clear = stride >= span;
            span = stride.saturating_mul(n - 1).saturating_add(span);
            clear
        })
    }
}

/// Byte strides of a packed row-major tensor.
pub fn contiguous_strides(shape: &[usize], dtype: DType) -> Vec<usize> {
    let mut strides = vec![dtype.size_bytes(); shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// An affine piece of a cache: the elements of some heads, rows and lanes of one part of one layer.
///
/// Element (h, r, l), counted from the starts of the ranges, is at
/// `offset_bytes + h · strides_bytes[0] + r · strides_bytes[1] + l · strides_bytes[2]` of its tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The layer, as the model numbers it.
    pub layer: usize,
    /// What it holds.
    pub part: Part,
    /// What it is within its encoding.
    pub role: Role,
    /// How its elements are encoded.
    pub encoding: Encoding,
    /// Heads.
    pub heads: Range<usize>,
    /// Rows: positions of tokens; of a convolution state, positions of the inputs its steps saw; of a
    /// recurrent state, value lanes.
    pub rows: Range<i64>,
    /// Lanes: of a head, channels, or key lanes of a recurrent state. In a packed encoding, stored words.
    pub lanes: Range<usize>,
    /// Index of the tensor.
    pub tensor: usize,
    /// Type of the stored elements.
    pub dtype: DType,
    /// First element.
    pub offset_bytes: usize,
    /// Strides along heads, rows and lanes.
    pub strides_bytes: [usize; 3],
}

impl Block {
    /// Elements along heads, rows and lanes.
    pub fn extents(&self) -> [usize; 3] {
        [self.heads.len(), usize::try_from(self.rows.end - self.rows.start).unwrap_or(0), self.lanes.len()]
    }
}

/// A layout bound to tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// The blocks, by rule, then layer, part, head and row.
    pub blocks: Vec<Block>,
    /// The tensors that blocks refer to by index.
    pub tensors: Vec<BoundTensor>,
    /// Tokens the cache has seen.
    pub tokens_seen: usize,
}

/// A tensor of a resolved layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundTensor {
    /// Its name.
    pub name: String,
    /// Bytes that blocks may refer to.
    pub len_bytes: usize,
    /// Whether distinct elements have distinct bytes, so that it can be written.
    pub writable: bool,
}

/// Sizes that a layout leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Slots of a layer that keeps the whole context.
    pub capacity: usize,
    /// Element type where a rule names none.
    pub dtype: DType,
    /// Slots of a block, for paged layouts.
    pub block_rows: usize,
    /// Bytes from one innermost line to the next; packed when absent.
    pub row_stride_bytes: Option<usize>,
}

impl Layout {
    /// Binds the layout to a model, to tensors and to the rows that are live in them.
    ///
    /// Tensors that no rule names are left alone.
    ///
    /// # Errors
    ///
    /// When a tensor is missing or differs from its rule in rank, size or type; when a block would leave its
    /// buffer; when the live rows do not fit; when a layer's keys, values or states have no tensor.
    pub fn resolve(
        &self,
        cache: &CacheSpec,
        tensors: &[TensorInfo],
        live: &LiveRows,
    ) -> Result<Resolved, LayoutError> {
        let mut blocks = Vec::new();
        let mut bound_by: Vec<Option<&str>> = vec![None; tensors.len()];
        for rule in &self.tensors {
            let layers = select(rule, cache, &self.name)?;
            let bound = Bound { layout: self, rule, cache, layers: &layers, tensors, live };
            let first = blocks.len();
            bound.blocks(&mut blocks)?;
            let mut used: Vec<usize> = blocks[first..].iter().map(|b| b.tensor).collect();
            used.sort_unstable();
            used.dedup();
            for tensor in used {
                if let Some(other) = bound_by[tensor].replace(&rule.name.0) {
                    return Err(bound.problem(format!(
                        "the rules `{other}` and `{}` both claim tensor `{}`",
                        rule.name.0, tensors[tensor].name
                    )));
                }
            }
        }
        for (layer, spec) in cache.layers.iter().enumerate() {
            for part in parts_of(spec) {
                if !blocks.iter().any(|b| b.layer == layer && b.part == *part && b.role == Role::Elements) {
                    return Err(LayoutError::Uncovered { layer, part: *part });
                }
            }
        }
        blocks.retain(|b| b.extents().iter().all(|&n| n > 0));
        let tensors = tensors
            .iter()
            .map(|t| BoundTensor { name: t.name.clone(), len_bytes: t.len_bytes, writable: t.is_injective() })
            .collect();
        Ok(Resolved { blocks, tensors, tokens_seen: live.tokens_seen })
    }

    /// The tensors this layout wants for a model, packed unless `sizes` pads them.
    ///
    /// # Errors
    ///
    /// When a rule does not fit the model.
    pub fn tensors(&self, cache: &CacheSpec, sizes: &Sizes) -> Result<Vec<TensorInfo>, LayoutError> {
        let mut tensors: Vec<TensorInfo> = Vec::new();
        for rule in &self.tensors {
            let layers = select(rule, cache, &self.name)?;
            let bound = Bound {
                layout: self,
                rule,
                cache,
                layers: &layers,
                tensors: &[],
                live: &LiveRows::default(),
            };
            for (index, &layer) in layers.iter().enumerate() {
                let stacked = if rule.name.is_per_layer() { &layers[index..=index] } else { &layers[..] };
                let heads = if rule.name.is_per_head() { heads_of(&cache.layers[layer]) } else { 1 };
                for head in 0..heads {
                    let name = rule.name.fill(layer, index, head);
                    if !tensors.iter().any(|t| t.name == name) {
                        tensors.push(bound.packed(name, layer, stacked, sizes)?);
                    }
                }
            }
        }
        Ok(tensors)
    }

    /// The names of the tensors this layout reads or writes for a model.
    ///
    /// # Errors
    ///
    /// When a rule names a layer that the model does not have.
    pub fn tensor_names(&self, cache: &CacheSpec) -> Result<Vec<String>, LayoutError> {
        let mut names = Vec::new();
        for rule in &self.tensors {
            let layers = select(rule, cache, &self.name)?;
            for (index, &layer) in layers.iter().enumerate() {
                let heads = if rule.name.is_per_head() { heads_of(&cache.layers[layer]) } else { 1 };
                for head in 0..heads {
                    let name = rule.name.fill(layer, index, head);
                    if !names.contains(&name) {
                        names.push(name);
                    }
                }
            }
        }
        Ok(names)
    }
}

/// The parts that a layer keeps.
fn parts_of(spec: &LayerSpec) -> &'static [Part] {
    match spec {
        LayerSpec::Full { .. } | LayerSpec::Sliding { .. } => &[Part::Key, Part::Value],
        LayerSpec::Recurrent { conv_steps: 0, .. } => &[Part::State],
        LayerSpec::Recurrent { heads: 0, .. } => &[Part::Conv],
        LayerSpec::Recurrent { .. } => &[Part::Conv, Part::State],
        LayerSpec::Shared { .. } => &[],
    }
}

fn heads_of(spec: &LayerSpec) -> usize {
    match spec {
        LayerSpec::Recurrent { heads, .. } => *heads,
        other => other.attention().map_or(0, |(heads, ..)| heads),
    }
}

/// The layers that a rule speaks of.
fn select(rule: &TensorRule, cache: &CacheSpec, layout: &str) -> Result<Vec<usize>, LayoutError> {
    let wanted = |spec: &LayerSpec| {
        rule.parts().iter().all(|p| parts_of(spec).contains(p))
            && match rule.layers {
                LayerSet::Full => matches!(spec, LayerSpec::Full { .. }),
                LayerSet::Sliding => matches!(spec, LayerSpec::Sliding { .. }),
                LayerSet::Recurrent => matches!(spec, LayerSpec::Recurrent { .. }),
                LayerSet::All | LayerSet::List(_) => true,
            }
    };
    if let LayerSet::List(list) = &rule.layers {
        for (i, &layer) in list.iter().enumerate() {
            if list[..i].contains(&layer) {
                let problem = format!("tensor `{}` lists layer {layer} twice", rule.name.0);
                return Err(LayoutError::BadLayout { layout: layout.to_owned(), problem });
            }
            let known = cache.layers.get(layer).is_some_and(&wanted);
            if !known {
                let problem = format!(
                    "tensor `{}` lists layer {layer}, of which the model keeps no {}",
                    rule.name.0,
                    rule.parts()[0]
                );
                return Err(LayoutError::BadLayout { layout: layout.to_owned(), problem });
            }
        }
        return Ok(list.clone());
    }
    Ok((0..cache.layers.len()).filter(|&l| wanted(&cache.layers[l])).collect())
}

/// A run of rows in consecutive slots of one physical block.
struct Run {
    rows: Range<i64>,
    block: usize,
    slot: usize,
}

/// One axis of a bound tensor.
#[derive(Clone, Copy)]
struct Bind {
    size: usize,
    stride_bytes: usize,
}

/// A rule about to be bound.
struct Bound<'a> {
    layout: &'a Layout,
    rule: &'a TensorRule,
    cache: &'a CacheSpec,
    layers: &'a [usize],
    tensors: &'a [TensorInfo],
    live: &'a LiveRows,
}

impl Bound<'_> {
    fn blocks(&self, blocks: &mut Vec<Block>) -> Result<(), LayoutError> {
        let rule = self.rule;
        for (index, &layer) in self.layers.iter().enumerate() {
            let spec = &self.cache.layers[layer];
            // Layers stacked in one tensor are bound together, at its first layer's turn in the list.
            let stacked = if rule.name.is_per_layer() { &self.layers[index..=index] } else { self.layers };
            let position = if rule.name.is_per_layer() { 0 } else { index };
            if !rule.name.is_per_layer() && !rule.axes.has(Axis::Layer) && self.layers.len() > 1 {
                return Err(self.problem(format!(
                    "tensor `{}` has neither a layer axis nor {{layer}} in its name, for {} layers",
                    rule.name.0,
                    self.layers.len()
                )));
            }
            let heads = if rule.name.is_per_head() { heads_of(spec) } else { 1 };
            for head in 0..heads {
                let name = rule.name.fill(layer, index, head);
                let tensor = self.find(&name)?;
                let only = rule.name.is_per_head().then_some(head);
                self.layer_blocks(stacked, position, layer, tensor, only, blocks)?;
            }
        }
        Ok(())
    }

    fn problem(&self, problem: String) -> LayoutError {
        LayoutError::BadLayout { layout: self.layout.name.clone(), problem }
    }

    /// A tensor of this rule for the layers `stacked` in it.
    fn packed(
        &self,
        name: String,
        layer: usize,
        stacked: &[usize],
        sizes: &Sizes,
    ) -> Result<TensorInfo, LayoutError> {
        let dtype = self.rule.dtype.unwrap_or(sizes.dtype);
        let mut info = TensorInfo::contiguous(name, dtype, &[]);
        let spec = &self.cache.layers[layer];
        let paged = self.rule.axes.has(Axis::Block);
        for dimension in self.rule.axes.dimensions() {
            let mut size = 1usize;
            for &axis in &dimension.0 {
                let of_axis = match (axis, spec) {
                    (Axis::Row, LayerSpec::Recurrent { conv_steps, .. }) => *conv_steps,
                    (Axis::Row, _) if paged => sizes.block_rows,
                    (Axis::Block, _) => sizes.capacity.div_ceil(sizes.block_rows.max(1)),
                    (Axis::Row, LayerSpec::Sliding { window, .. }) => {
                        // A window that moves has its own size; one that does not holds the whole context.
                        match self.rule.placement.unwrap_or(self.layout.placement) {
                            Placement::Left | Placement::LeftPadded | Placement::Paged => sizes.capacity,
                            Placement::Right | Placement::Ring | Placement::RingIndexed => window.size,
                        }
                    }
                    (Axis::Row, _) => sizes.capacity,
                    _ => self.axis_size(axis, stacked, &info)?.unwrap_or(1),
                };
                size = size
                    .checked_mul(of_axis)
                    .ok_or_else(|| LayoutError::TooLarge { tensor: info.name.clone() })?;
            }
            info.shape.push(size);
        }
        let too_large = || LayoutError::TooLarge { tensor: info.name.clone() };
        let mut stride = dtype.size_bytes();
        let mut strides = Vec::new();
        for (i, &size) in info.shape.iter().rev().enumerate() {
            strides.push(stride);
            stride = stride.checked_mul(size.max(1)).ok_or_else(too_large)?;
            if let (0, Some(pitch)) = (i, sizes.row_stride_bytes) {
                if pitch < stride || pitch % dtype.size_bytes() != 0 {
                    return Err(self.problem(format!(
                        "a row stride of {pitch} bytes does not hold the {stride} bytes of a row of tensor `{}`",
                        info.name
                    )));
                }
                stride = pitch;
            }
        }
        strides.reverse();
        let len_bytes = if info.shape.contains(&0) { 0 } else { stride };
        Ok(TensorInfo { strides_bytes: strides, len_bytes, ..info })
    }

    fn find(&self, name: &str) -> Result<usize, LayoutError> {
        let mut found = self.tensors.iter().enumerate().filter(|(_, t)| t.name == name);
        match (found.next(), found.next()) {
            (Some((i, _)), None) => Ok(i),
            (Some(_), Some(_)) => Err(self.problem(format!("two tensors are called `{name}`"))),
            (None, _) => Err(LayoutError::MissingTensor {
                layout: self.layout.name.clone(),
                tensor: name.to_owned(),
                have: match self.tensors {
                    [] => "none".to_owned(),
                    some => some.iter().map(|t| format!("`{}`", t.name)).collect::<Vec<_>>().join(", "),
                },
            }),
        }
    }

    /// The blocks of one layer in `tensor`, where it is number `position` of the layers `stacked` there.
    fn layer_blocks(
        &self,
        stacked: &[usize],
        position: usize,
        layer: usize,
        tensor: usize,
        only_head: Option<usize>,
        blocks: &mut Vec<Block>,
    ) -> Result<(), LayoutError> {
        let rule = self.rule;
        let spec = &self.cache.layers[layer];
        let info = &self.tensors[tensor];
        let dtype = rule.dtype.unwrap_or(info.dtype);
        if dtype != info.dtype {
            return Err(LayoutError::DTypeMismatch {
                tensor: info.name.clone(),
                want: dtype,
                have: info.dtype,
            });
        }
        let axes = self.bind(stacked, info)?;
        let get = |axis: Axis| axes.iter().find(|(a, _)| *a == axis).map(|(_, b)| *b);
        let one = Bind { size: 1, stride_bytes: 0 };

        for (p, &part) in rule.parts().iter().enumerate() {
            let base = position * get(Axis::Layer).unwrap_or(one).stride_bytes
                + p * get(Axis::Part).unwrap_or(one).stride_bytes;
            let heads = match (only_head, part) {
                (Some(h), _) => h..h + 1,
                (None, Part::Conv) => 0..1,
                (None, _) => 0..heads_of(spec),
            };
            let head_stride = get(Axis::KvHead).unwrap_or(one).stride_bytes;
            let mut push = |rows: Range<i64>, offset: usize, row: Bind, lane: Bind, lanes: usize| {
                blocks.push(Block {
                    layer,
                    part,
                    role: rule.role,
                    encoding: rule.encoding,
                    heads: heads.clone(),
                    rows,
                    lanes: 0..lanes,
                    tensor,
                    dtype,
                    offset_bytes: base + offset,
                    strides_bytes: [head_stride, row.stride_bytes, lane.stride_bytes],
                });
            };
            if part == Part::State {
                let (row, lane) = (get(Axis::ValueDim).unwrap_or(one), get(Axis::KeyDim).unwrap_or(one));
                let rows = i64::try_from(row.size).unwrap_or(i64::MAX);
                push(0..rows, 0, row, lane, lane.size);
                continue;
            }
            let row = get(Axis::Row).unwrap_or(one);
            let block = get(Axis::Block).unwrap_or(one);
            let lane = get(if part == Part::Conv { Axis::Channel } else { Axis::HeadDim }).unwrap_or(one);
            let lanes = self.stored_lanes(spec, part).unwrap_or(lane.size);
            for run in self.runs(layer, part, row.size, block.size)? {
                let offset = run.block * block.stride_bytes + run.slot * row.stride_bytes;
                push(run.rows, offset, row, lane, lanes);
            }
        }
        Ok(())
    }

    /// Lanes that are real, in stored elements.
    fn stored_lanes(&self, spec: &LayerSpec, part: Part) -> Option<usize> {
        let (_, key, value) = spec.attention()?;
        let lanes = if part == Part::Key { key } else { value };
        Some(match (self.rule.encoding, self.rule.role) {
            (Encoding::Affine { bits, .. }, Role::Elements) => lanes * usize::from(bits) / 32,
            (Encoding::Affine { group_size, .. }, _) => lanes / group_size,
            (_, Role::Elements) => lanes,
            (_, _) => 1,
        })
    }

    /// Sizes and strides of the tensor's axes, checked against the model.
    fn bind(&self, stacked: &[usize], info: &TensorInfo) -> Result<Vec<(Axis, Bind)>, LayoutError> {
        let pattern = &self.rule.axes;
        let (want, have) = (pattern.dimensions().len(), info.shape.len());
        if want != have || info.strides_bytes.len() != have {
            let (tensor, pattern) = (info.name.clone(), pattern.to_string());
            return Err(LayoutError::Rank { tensor, pattern, want, have });
        }
        let mut axes = Vec::new();
        let mut last_byte = info.dtype.size_bytes();
        for ((dimension, &size), &stride) in
            pattern.dimensions().iter().zip(&info.shape).zip(&info.strides_bytes)
        {
            let too_large = || LayoutError::TooLarge { tensor: info.name.clone() };
            let reach = size.saturating_sub(1).checked_mul(stride).ok_or_else(too_large)?;
            last_byte = last_byte.checked_add(reach).ok_or_else(too_large)?;
            let known: Vec<Option<usize>> =
                dimension.0.iter().map(|&a| self.axis_size(a, stacked, info)).collect::<Result<_, _>>()?;
            let product: usize = known.iter().flatten().product();
            let unknown = known.iter().filter(|k| k.is_none()).count();
            let fits = match unknown {
                0 => product == size,
                1 => product > 0 && size % product == 0,
                _ => return Err(self.problem(format!("`{pattern}` leaves two sizes of one dimension open"))),
            };
            if !fits {
                let axis = match dimension.0.as_slice() {
                    [] => "1".to_owned(),
                    some => some.iter().map(|a| a.name()).collect::<Vec<_>>().join("·"),
                };
                let tensor = info.name.clone();
                return Err(LayoutError::AxisSize { tensor, axis, want: product, have: size });
            }
            let mut stride_bytes = stride;
            for (&axis, known) in dimension.0.iter().zip(&known).rev() {
                let size = known.unwrap_or(size / product.max(1));
                axes.push((axis, Bind { size, stride_bytes }));
                stride_bytes = stride_bytes.checked_mul(size).ok_or_else(too_large)?;
            }
        }
        let empty = info.shape.contains(&0);
        if !empty && last_byte > info.len_bytes {
            let (tensor, have_bytes) = (info.name.clone(), info.len_bytes);
            return Err(LayoutError::OutOfBounds { tensor, end_bytes: last_byte, have_bytes });
        }
        Ok(axes)
    }

    /// The size that the model gives an axis; `None` where the tensor decides.
    fn axis_size(
        &self,
        axis: Axis,
        stacked: &[usize],
        info: &TensorInfo,
    ) -> Result<Option<usize>, LayoutError> {
        let uniform = |of: &dyn Fn(&LayerSpec) -> usize| {
            let mut sizes = stacked.iter().map(|&l| of(&self.cache.layers[l]));
            let first = sizes.next().unwrap_or(0);
            match sizes.find(|&s| s != first) {
                None => Ok(Some(first)),
                Some(other) => {
                    Err(LayoutError::MixedLayers { tensor: info.name.clone(), axis, first, other })
                }
            }
        };
        match axis {
            Axis::Batch => Ok(Some(1)),
            Axis::Layer => Ok(Some(stacked.len())),
            Axis::Part => Ok(Some(self.rule.parts().len())),
            Axis::KvHead => uniform(&heads_of),
            Axis::HeadDim => match (self.rule.padded_head_dim, self.rule.encoding) {
                (Some(padded), _) => Ok(Some(padded)),
                (None, _) => uniform(&|spec| {
                    let parts = self.rule.parts();
                    self.stored_lanes(spec, parts[0]).unwrap_or(0)
                }),
            },
            Axis::Channel => uniform(&|spec| match spec {
                LayerSpec::Recurrent { conv_channels, .. } => *conv_channels,
                _ => 0,
            }),
            Axis::ValueDim => uniform(&|spec| match spec {
                LayerSpec::Recurrent { value_dim, .. } => *value_dim,
                _ => 0,
            }),
            Axis::KeyDim => uniform(&|spec| match spec {
                LayerSpec::Recurrent { key_dim, .. } => *key_dim,
                _ => 0,
            }),
            Axis::Row | Axis::Block => Ok(None),
        }
    }

    /// Where the live rows of a layer are: runs of consecutive positions in consecutive slots.
    fn runs(&self, layer: usize, part: Part, slots: usize, blocks: usize) -> Result<Vec<Run>, LayoutError> {
        let placement = self.rule.placement.unwrap_or(self.layout.placement);
        let (live, window) = (self.live, self.cache.layers[layer].window());
        if part == Part::Conv {
            // A convolution state is full from the start: its steps before the first token are zeros.
            let full = LiveRows { live: Some(slots), ..live.clone() };
            return Placed { layer, slots, blocks, live: &full, window: None, signed: true }.runs(placement);
        }
        Placed { layer, slots, blocks, live, window, signed: false }.runs(placement)
    }
}

/// The rows of one layer and the slots they may be in.
struct Placed<'a> {
    layer: usize,
    slots: usize,
    blocks: usize,
    live: &'a LiveRows,
    window: Option<Window>,
    /// Whether positions before the first token count.
    signed: bool,
}

impl Placed<'_> {
    fn runs(&self, placement: Placement) -> Result<Vec<Run>, LayoutError> {
        let n = self.live.tokens_seen;
        let capacity = if placement == Placement::Paged { self.slots * self.blocks } else { self.slots };
        let held = match self.live.live {
            Some(live) if live > n && !self.signed => {
                return Err(self.error(format!("{live} live rows of {n} tokens seen")));
            }
            Some(live) => live,
            None => n,
        };
        let end = signed(n);
        let rows = end - signed(held)..end;
        let run = |rows: Range<i64>, slot| Run { rows, block: 0, slot };
        let must_fit = |want: usize| {
            if want > capacity {
                return Err(LayoutError::Capacity { layer: self.layer, want, capacity });
            }
            Ok(())
        };
        match placement {
            Placement::Left => {
                must_fit(held)?;
                Ok(vec![run(rows, 0)])
            }
            Placement::Right => {
                // A window that is shifted keeps the newest rows; everything else must fit.
                let held = if self.window.is_some() { held.min(capacity) } else { held };
                must_fit(held)?;
                Ok(vec![run(end - signed(held)..end, capacity - held)])
            }
            Placement::LeftPadded => {
                let pad = self.live.pad.ok_or_else(|| {
                    self.error("left-padded rows need the number of padding slots (`pad`)".to_owned())
                })?;
                must_fit(pad.saturating_add(held))?;
                Ok(vec![run(rows, pad)])
            }
            Placement::Ring => {
                let held = held.min(capacity);
                let first = n - held.min(n);
                let start = if capacity == 0 { 0 } else { first % capacity };
                Ok(self.ring(signed(first)..end, start, 0, capacity))
            }
            Placement::RingIndexed => {
                let keep = self.window.map_or(0, |w| w.keep).min(capacity);
                if held <= capacity && (self.live.ring_start.is_none() || held < capacity) {
                    return Ok(vec![run(rows, 0)]);
                }
                let start = self.live.ring_start.unwrap_or(keep);
                if start < keep || start >= capacity.max(1) {
                    return Err(self.error(format!("ring start {start} is not within {keep}..{capacity}")));
                }
                let mut runs = self.ring(end - signed(capacity - keep)..end, start, keep, capacity);
                if keep > 0 {
                    runs.insert(0, run(0..signed(keep), 0));
                }
                Ok(runs)
            }
            Placement::Paged => {
                must_fit(held)?;
                let table = self
                    .live
                    .block_table
                    .as_ref()
                    .ok_or_else(|| self.error("paged rows need a block table".to_owned()))?;
                let mut runs = Vec::new();
                for first in (0..held).step_by(self.slots.max(1)) {
                    let entry = first / self.slots;
                    let block = *table.get(entry).ok_or_else(|| {
                        self.error(format!(
                            "the block table has {} entries, row {first} needs more",
                            table.len()
                        ))
                    })? as usize;
                    if block >= self.blocks {
                        return Err(
                            self.error(format!("block {block} of the table, of {} blocks", self.blocks))
                        );
                    }
                    if table[..entry].contains(&table[entry]) {
                        return Err(self.error(format!("block {block} is in the table twice")));
                    }
                    let count = self.slots.min(held - first);
                    let start = rows.start + signed(first);
                    runs.push(Run { rows: start..start + signed(count), block, slot: 0 });
                }
                Ok(runs)
            }
        }
    }

    /// Rows in the slots `low..high`, the oldest in slot `start`.
    fn ring(&self, rows: Range<i64>, start: usize, low: usize, high: usize) -> Vec<Run> {
        let turn = (rows.start + signed(high - start)).min(rows.end);
        vec![
            Run { rows: rows.start..turn, block: 0, slot: start },
            Run { rows: turn..rows.end, block: 0, slot: low },
        ]
    }

    fn error(&self, problem: String) -> LayoutError {
        LayoutError::LiveRows { layer: self.layer, problem }
    }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).expect("rows are fewer than 2^63")
}
