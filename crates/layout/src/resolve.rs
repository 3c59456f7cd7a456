//! From rules to bytes: a layout, a model, tensors and live rows become affine blocks.

use std::collections::HashMap;
use std::ops::Range;

use crate::bind::{Axes, Bind, Bound, RuleTensor, heads_of, parts_of};
use crate::live::LiveRows;
use crate::placement::length;
use crate::{Axis, CacheSpec, DType, Encoding, LayerSpec, Layout, LayoutError, Part, Role, TensorInfo};

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
    /// Lanes: of a head, channels, or key lanes of a recurrent state. In a packed encoding, stored words; of
    /// scales and biases, one for each group.
    pub lanes: Range<usize>,
    /// Stored elements after the lanes that pad a head: zero in a cache that is handed out.
    pub padding: usize,
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
    /// The blocks, by rule, then tensor, layer, part and row.
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

impl Resolved {
    /// The blocks of one part of one layer.
    pub fn part(&self, layer: usize, part: Part) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |b| (b.layer, b.part) == (layer, part))
    }

    /// The same cache with only the rows whose positions are in `rows`, of layers that keep keys and values;
    /// states of recurrent layers, which have no rows of tokens, stay when `states` says so.
    ///
    /// Taken of a target, it plans the copies of these rows alone.
    #[must_use]
    pub fn only_rows(&self, rows: &Range<i64>, states: bool) -> Resolved {
        let clip = |block: &Block| {
            if matches!(block.part, Part::Conv | Part::State) {
                return states.then(|| block.clone());
            }
            let clipped = block.rows.start.max(rows.start)..block.rows.end.min(rows.end);
            let down = usize::try_from(clipped.start - block.rows.start).ok()?;
            (clipped.start < clipped.end).then(|| Block {
                offset_bytes: block.offset_bytes + down * block.strides_bytes[1],
                rows: clipped,
                ..block.clone()
            })
        };
        Resolved { blocks: self.blocks.iter().filter_map(clip).collect(), ..self.clone() }
    }

    /// One part of one layer as a packed `[head, row, lane]` tensor of `dtype`, in canonical order, and that
    /// tensor; `None` where the layer keeps no such part.
    ///
    /// There is a block for each run of positions: two where a window keeps rows from the start of the context.
    pub fn canonical(&self, layer: usize, part: Part, dtype: DType) -> Option<(Resolved, TensorInfo)> {
        let elements = || self.part(layer, part).filter(|b| b.role == Role::Elements);
        let first = elements().next()?;
        let mut heads = first.heads.clone();
        let mut held: Vec<Range<i64>> = Vec::new();
        for block in elements() {
            heads = heads.start.min(block.heads.start)..heads.end.max(block.heads.end);
            held.push(block.rows.clone());
        }
        held.sort_unstable_by_key(|rows| rows.start);
        let mut runs: Vec<Range<i64>> = Vec::new();
        for rows in held {
            match runs.last_mut() {
                Some(last) if rows.start <= last.end => last.end = last.end.max(rows.end),
                _ => runs.push(rows),
            }
        }
        let length = |rows: &Range<i64>| usize::try_from(rows.end - rows.start).unwrap_or(0);
        let lanes = 0..first.encoding.lanes(first.lanes.end);
        let count = runs.iter().map(length).sum();
        let info = TensorInfo::contiguous("canonical", dtype, &[heads.len(), count, lanes.len()]);
        let strides_bytes = [0, 1, 2].map(|i| info.strides_bytes[i]);
        let mut slot = 0;
        let block = |rows: Range<i64>| {
            let offset_bytes = slot * strides_bytes[1];
            slot += length(&rows);
            Block {
                layer,
                part,
                role: Role::Elements,
                encoding: Encoding::Plain,
                heads: heads.clone(),
                rows,
                lanes: lanes.clone(),
                padding: 0,
                tensor: 0,
                dtype,
                offset_bytes,
                strides_bytes,
            }
        };
        let blocks = runs.into_iter().map(block).collect();
        let tensor = BoundTensor { name: info.name.clone(), len_bytes: info.len_bytes, writable: true };
        Some((Resolved { blocks, tensors: vec![tensor], tokens_seen: self.tokens_seen }, info))
    }
}

impl Layout {
    /// Binds the layout to a model, to tensors and to the rows that are live in them.
    ///
    /// Tensors that no rule names are left alone.
    ///
    /// # Errors
    ///
    /// When a tensor is missing or differs from its rule in rank, size or type; when a block would leave its
    /// buffer; when the live rows do not fit; when a layer's keys, values or states have no tensor, or two.
    pub fn resolve(
        &self,
        cache: &CacheSpec,
        tensors: &[TensorInfo],
        live: &LiveRows,
    ) -> Result<Resolved, LayoutError> {
        let named = Named::new(&self.name, tensors);
        let mut claims = Claims::new(cache, tensors.len());
        let mut blocks = Vec::with_capacity(2 * cache.layers.len());
        for rule in &self.tensors {
            let bound = Bound::new(self, rule, cache)?;
            let held = bound
                .tensors(|name, rest| bound.group_from_shape(&tensors[named.find(name)?], rest, live))?;
            for tensor in &held {
                let index = named.find(&tensor.name)?;
                if let Some(other) = claims.tensors[index].replace(&rule.name.0) {
                    return Err(bound.problem(format!(
                        "the rules `{other}` and `{}` both claim tensor `{}`",
                        rule.name.0, tensor.name
                    )));
                }
                claims.parts(&bound, tensor)?;
                bind_tensor(&bound, tensor, (index, &tensors[index]), live, &mut blocks)?;
            }
        }
        claims.complete(self, cache)?;
        blocks.retain(|b| b.extents().iter().all(|&n| n > 0));
        let tensors = tensors
            .iter()
            .map(|t| BoundTensor { name: t.name.clone(), len_bytes: t.len_bytes, writable: t.is_injective() })
            .collect();
        Ok(Resolved { blocks, tensors, tokens_seen: live.tokens_seen })
    }
}

/// Appends the blocks of one tensor.
fn bind_tensor(
    bound: &Bound<'_>,
    tensor: &RuleTensor,
    (index, info): (usize, &TensorInfo),
    live: &LiveRows,
    blocks: &mut Vec<Block>,
) -> Result<(), LayoutError> {
    let rule = bound.rule;
    if let Some(want) = rule.element_type().filter(|&d| d != info.dtype) {
        return Err(LayoutError::DTypeMismatch { tensor: info.name.clone(), want, have: info.dtype });
    }
    let floats = matches!(info.dtype, DType::Float16 | DType::BFloat16 | DType::Float32);
    if !floats && (rule.encoding == Encoding::Plain || rule.role != Role::Elements) {
        return Err(LayoutError::NotFloats { tensor: info.name.clone(), have: info.dtype });
    }
    let axes = bound.bind(tensor, info, live)?;
    let sequence = live.sequence.unwrap_or(0);
    let batch = axes.get(Axis::Batch);
    if rule.axes.has(Axis::Batch) && sequence >= batch.size {
        let axes = [Axis::Batch];
        return Err(crate::bind::axis_size_error(info, &axes, sequence + 1, batch.size));
    }
    for (position, &layer) in bound.layers[tensor.layers.clone()].iter().enumerate() {
        for (number, &part) in tensor.parts.iter().enumerate() {
            let base = position * axes.get(Axis::Layer).stride_bytes
                + number * axes.get(Axis::Part).stride_bytes
                + sequence * batch.stride_bytes;
            let spec = &bound.cache.layers[layer];
            let heads = match (tensor.head, part) {
                (Some(head), _) => head..head + 1,
                (None, Part::Conv) => 0..1,
                // A scale that heads share is one head's.
                (None, _) if bound.shares_scales() => 0..1,
                (None, _) => 0..heads_of(spec),
            };
            let at = Piece { layer, part, heads, tensor: index, dtype: info.dtype, base };
            piece_blocks(bound, &axes, &at, spec, live, blocks)?;
        }
    }
    Ok(())
}

/// One part of one layer in a tensor.
struct Piece {
    layer: usize,
    part: Part,
    heads: Range<usize>,
    tensor: usize,
    dtype: DType,
    base: usize,
}

fn piece_blocks(
    bound: &Bound<'_>,
    axes: &Axes,
    at: &Piece,
    spec: &LayerSpec,
    live: &LiveRows,
    blocks: &mut Vec<Block>,
) -> Result<(), LayoutError> {
    let head_stride = axes.get(Axis::KvHead).stride_bytes;
    let mut push = |rows: Range<i64>, offset: usize, row: Bind, lane: Bind, lanes: usize| {
        blocks.push(Block {
            layer: at.layer,
            part: at.part,
            role: bound.rule.role,
            encoding: bound.rule.encoding,
            heads: at.heads.clone(),
            rows,
            lanes: 0..lanes,
            padding: lane.size - lanes,
            tensor: at.tensor,
            dtype: at.dtype,
            offset_bytes: at.base + offset,
            strides_bytes: [head_stride, row.stride_bytes, lane.stride_bytes],
        });
    };
    if at.part == Part::State {
        let (row, lane) = (axes.get(Axis::ValueDim), axes.get(Axis::KeyDim));
        push(0..crate::placement::signed(row.size), 0, row, lane, lane.size);
        return Ok(());
    }
    let (row, block) = (axes.get(Axis::Row), axes.get(Axis::Block));
    let (lane, lanes) = if at.part == Part::Conv {
        let lane = axes.get(Axis::Channel);
        (lane, lane.size)
    } else {
        let lane = axes.get(Axis::HeadDim);
        let lanes = bound.stored_lanes(spec, at.part)?;
        if lanes > lane.size {
            return Err(bound.problem(format!(
                "heads of {lanes} stored lanes do not fit the {} of tensor `{}`",
                lane.size, bound.rule.name.0
            )));
        }
        (lane, lanes)
    };
    // In blocks of one row, rows are as far apart as blocks are. Blocks that follow one another are one.
    let row = if row.size == 1 && block.size > 1 { block } else { row };
    let mut open: Option<(Range<i64>, usize)> = None;
    for run in bound.runs(at.layer, at.part, axes.get(Axis::Row).size, block.size, live)? {
        let offset = run.block * block.stride_bytes + run.slot * axes.get(Axis::Row).stride_bytes;
        match &mut open {
            Some((rows, first))
                if rows.end == run.rows.start && offset == *first + length(rows) * row.stride_bytes =>
            {
                rows.end = run.rows.end;
            }
            _ => {
                if let Some((rows, first)) = open.replace((run.rows, offset)) {
                    push(rows, first, row, lane, lanes);
                }
            }
        }
    }
    if let Some((rows, first)) = open {
        push(rows, first, row, lane, lanes);
    }
    Ok(())
}

/// Tensors by name.
struct Named<'a> {
    layout: &'a str,
    tensors: &'a [TensorInfo],
    index: HashMap<&'a str, (usize, bool)>,
}

impl<'a> Named<'a> {
    fn new(layout: &'a str, tensors: &'a [TensorInfo]) -> Named<'a> {
        let mut index = HashMap::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            index.entry(tensor.name.as_str()).and_modify(|(_, twice)| *twice = true).or_insert((i, false));
        }
        Named { layout, tensors, index }
    }

    fn find(&self, name: &str) -> Result<usize, LayoutError> {
        match self.index.get(name) {
            Some((i, false)) => Ok(*i),
            Some((_, true)) => Err(LayoutError::BadLayout {
                layout: self.layout.to_owned(),
                problem: format!("two tensors are called `{name}`"),
            }),
            None => Err(LayoutError::MissingTensor {
                layout: self.layout.to_owned(),
                tensor: name.to_owned(),
                have: match self.tensors {
                    [] => "none".to_owned(),
                    some => some.iter().map(|t| format!("`{}`", t.name)).collect::<Vec<_>>().join(", "),
                },
            }),
        }
    }
}

/// Which rule holds what: everything once.
struct Claims<'a> {
    tensors: Vec<Option<&'a str>>,
    /// Rule and encoding, by layer, part and role.
    parts: Vec<[Option<(&'a str, Encoding)>; 12]>,
}

impl<'a> Claims<'a> {
    fn new(cache: &CacheSpec, tensors: usize) -> Claims<'a> {
        Claims { tensors: vec![None; tensors], parts: vec![[None; 12]; cache.layers.len()] }
    }

    fn parts(&mut self, bound: &Bound<'a>, tensor: &RuleTensor) -> Result<(), LayoutError> {
        let rule = bound.rule;
        for &layer in &bound.layers[tensor.layers.clone()] {
            for &part in tensor.parts {
                let mine = (rule.name.0.as_str(), rule.encoding);
                let claim = &mut self.parts[layer][part as usize * 3 + rule.role as usize];
                match claim.replace(mine) {
                    Some((other, _)) if tensor.head.is_none_or(|h| h == 0) => {
                        return Err(bound.problem(format!(
                            "the {} of layer {layer} are in `{other}` and in `{}`",
                            claim_name(part, rule.role),
                            rule.name.0
                        )));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Whether every part has its elements, and every encoding its scales and biases.
    fn complete(&self, layout: &Layout, cache: &CacheSpec) -> Result<(), LayoutError> {
        for (layer, (spec, claims)) in cache.layers.iter().zip(&self.parts).enumerate() {
            for &part in parts_of(spec) {
                let claim = |role: Role| claims[part as usize * 3 + role as usize];
                let Some((_, encoding)) = claim(Role::Elements) else {
                    if layout.partial {
                        continue;
                    }
                    return Err(LayoutError::Uncovered { layer, part });
                };
                for role in [Role::Scale, Role::Bias] {
                    let wanted = encoding.roles().contains(&role).then_some(encoding);
                    let have = claim(role).map(|(_, encoding)| encoding);
                    if wanted != have {
                        let show = |e: Option<Encoding>| e.map_or("none".to_owned(), |e| e.to_string());
                        return Err(LayoutError::BadLayout {
                            layout: layout.name.clone(),
                            problem: format!(
                                "layer {layer}: the {} need {}, there are {}",
                                claim_name(part, role),
                                show(wanted),
                                show(have)
                            ),
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

fn claim_name(part: Part, role: Role) -> String {
    if role == Role::Elements { part.to_string() } else { format!("{} of the {part}", role.name()) }
}

#[cfg(test)]
mod tests;
