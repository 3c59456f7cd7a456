//! A rule against a model: which tensors it names, and how their axes are measured.

use std::ops::Range;

use crate::live::LiveRows;
use crate::names::NamePlaces;
use crate::placement::{Placed, Run};
use crate::rules::Holds;
use crate::{
    Axis, AxisPattern, CacheSpec, Encoding, LayerSet, LayerSpec, Layout, LayoutError, Part, Placement, Role,
    TensorInfo, TensorRule,
};

/// One axis of a bound tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bind {
    pub(crate) size: usize,
    pub(crate) stride_bytes: usize,
}

/// The axes of a bound tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axes([Option<Bind>; Axis::COUNT]);

impl Axes {
    /// An axis; one that the pattern lacks has one element.
    pub(crate) fn get(&self, axis: Axis) -> Bind {
        self.0[axis as usize].unwrap_or(Bind { size: 1, stride_bytes: 0 })
    }
}

/// A tensor that a rule names, and what it holds.
#[derive(Clone, Debug)]
pub(crate) struct RuleTensor {
    pub(crate) name: String,
    /// Which of the rule's layers.
    pub(crate) layers: Range<usize>,
    /// The only head, where heads are apart.
    pub(crate) head: Option<usize>,
    /// Its parts, in the order of the part axis.
    pub(crate) parts: &'static [Part],
}

/// A rule and the layers of a model that it speaks of.
pub(crate) struct Bound<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) rule: &'a TensorRule,
    pub(crate) cache: &'a CacheSpec,
    pub(crate) layers: Vec<usize>,
}

impl<'a> Bound<'a> {
    /// # Errors
    ///
    /// When the rule lists a layer twice, or one that keeps nothing of its kind, or stacks layers without an axis.
    pub(crate) fn new(
        layout: &'a Layout,
        rule: &'a TensorRule,
        cache: &'a CacheSpec,
    ) -> Result<Bound<'a>, LayoutError> {
        let mut bound = Bound { layout, rule, cache, layers: Vec::new() };
        let wanted = |spec: &LayerSpec| {
            rule.parts().iter().all(|p| parts_of(spec).contains(p))
                && match rule.layers {
                    LayerSet::Full => matches!(spec, LayerSpec::Full { .. }),
                    LayerSet::Sliding => matches!(spec, LayerSpec::Sliding { .. }),
                    LayerSet::Recurrent => matches!(spec, LayerSpec::Recurrent { .. }),
                    LayerSet::All | LayerSet::List(_) => true,
                }
        };
        let name = &rule.name.0;
        bound.layers = match &rule.layers {
            LayerSet::List(list) => {
                for (i, &layer) in list.iter().enumerate() {
                    if list[..i].contains(&layer) {
                        return Err(bound.problem(format!("tensor `{name}` lists layer {layer} twice")));
                    }
                    if !cache.layers.get(layer).is_some_and(&wanted) {
                        let part = rule.parts()[0];
                        return Err(bound.problem(format!(
                            "tensor `{name}` lists layer {layer}, of which the model keeps no {part}"
                        )));
                    }
                }
                list.clone()
            }
            _ => (0..cache.layers.len()).filter(|&l| wanted(&cache.layers[l])).collect(),
        };
        let count = bound.layers.len();
        if count > 1 && !rule.name.is_per_layer() && !rule.axes.has(Axis::Layer) {
            return Err(bound.problem(format!(
                "tensor `{name}` has neither a layer axis nor {{layer}} in its name, for {count} layers"
            )));
        }
        Ok(bound)
    }

    /// The tensors that the rule names. `group` says how many layers the group's tensor holds, from the name of
    /// the tensor and the layers that are left; it is asked where the rule does not say.
    pub(crate) fn tensors(
        &self,
        mut group: impl FnMut(&str, &[usize]) -> Result<usize, LayoutError>,
    ) -> Result<Vec<RuleTensor>, LayoutError> {
        let name = &self.rule.name;
        let mut tensors = Vec::new();
        let (mut start, mut number) = (0, 0);
        while start < self.layers.len() {
            let rest = &self.layers[start..];
            let count = if name.is_per_layer() {
                1
            } else if name.is_per_group() {
                match self.rule.group_layers {
                    Some(count) => count.min(rest.len()),
                    None => {
                        let first = name.fill(NamePlaces { group: number, ..NamePlaces::default() });
                        group(&first, rest)?
                    }
                }
            } else {
                rest.len()
            };
            let spec = &self.cache.layers[self.layers[start]];
            let heads = if name.is_per_head() { heads_of(spec) } else { 1 };
            let parts = self.rule.parts();
            let apart = if name.is_per_part() { parts.len() } else { 1 };
            for part in 0..apart {
                for kv_head in 0..heads {
                    let layer = self.layers[start];
                    let at = NamePlaces { layer, index: start, group: number, kv_head, value: part == 1 };
                    tensors.push(RuleTensor {
                        name: name.fill(at),
                        layers: start..start + count,
                        head: name.is_per_head().then_some(kv_head),
                        parts: if apart == 1 { parts } else { &parts[part..=part] },
                    });
                }
            }
            start += count;
            number += 1;
        }
        Ok(tensors)
    }

    pub(crate) fn problem(&self, problem: String) -> LayoutError {
        LayoutError::BadLayout { layout: self.layout.name.clone(), problem }
    }

    /// Lanes of a part of a layer, in stored elements of this rule's tensors.
    pub(crate) fn stored_lanes(&self, spec: &LayerSpec, part: Part) -> Result<usize, LayoutError> {
        let Some((_, key, value)) = spec.attention() else { return Ok(0) };
        let lanes = if part == Part::Key { key } else { value };
        self.stored(lanes)
    }

    fn stored(&self, lanes: usize) -> Result<usize, LayoutError> {
        let name = &self.rule.name.0;
        self.rule
            .encoding
            .stored(self.rule.role, lanes)
            .map_err(|problem| self.problem(format!("tensor `{name}`: {problem}")))
    }

    /// How many layers a tensor of unknown layers holds, from its shape.
    pub(crate) fn group_from_shape(
        &self,
        info: &TensorInfo,
        rest: &[usize],
        live: &LiveRows,
    ) -> Result<usize, LayoutError> {
        self.check_rank(info)?;
        for (dimension, &size) in self.rule.axes.dimensions().iter().zip(&info.shape) {
            if !dimension.0.contains(&Axis::Layer) {
                continue;
            }
            let mut others = 1;
            for &axis in dimension.0.iter().filter(|a| **a != Axis::Layer) {
                let known = self.axis_size(axis, &rest[..1], self.rule.parts(), live, &info.name)?;
                others *= known.ok_or_else(|| {
                    self.problem(format!("`{}` leaves two sizes of one dimension open", self.rule.axes))
                })?;
            }
            let count = size / others.max(1);
            if count == 0 || count * others != size || count > rest.len() {
                return Err(self.problem(format!(
                    "tensor `{}` holds {size} of (layers · {others}) along its layers, {} layers are left",
                    info.name,
                    rest.len()
                )));
            }
            return Ok(count);
        }
        Err(self.problem(format!("`{}` has no layer axis for a group", self.rule.axes)))
    }

    fn check_rank(&self, info: &TensorInfo) -> Result<(), LayoutError> {
        let pattern = &self.rule.axes;
        let (want, have) = (pattern.dimensions().len(), info.shape.len());
        if want != have || info.strides_bytes.len() != have {
            let (tensor, pattern) = (info.name.clone(), pattern.to_string());
            return Err(LayoutError::Rank { tensor, pattern, want, have });
        }
        Ok(())
    }

    /// Sizes and strides of the axes of `info`, checked against the layers `stacked` in it.
    pub(crate) fn bind(
        &self,
        tensor: &RuleTensor,
        info: &TensorInfo,
        live: &LiveRows,
    ) -> Result<Axes, LayoutError> {
        let stacked = &self.layers[tensor.layers.clone()];
        self.check_rank(info)?;
        self.check_absent(tensor, stacked)?;
        let pattern = &self.rule.axes;
        let too_large = || LayoutError::TooLarge { tensor: info.name.clone() };
        let mut axes = Axes([None; Axis::COUNT]);
        let mut last_byte = info.dtype.size_bytes();
        for ((dimension, &size), &stride) in
            pattern.dimensions().iter().zip(&info.shape).zip(&info.strides_bytes)
        {
            let reach = size.saturating_sub(1).checked_mul(stride).ok_or_else(too_large)?;
            last_byte = last_byte.checked_add(reach).ok_or_else(too_large)?;
            let mut known = [None; Axis::COUNT];
            let (mut product, mut open) = (1_usize, 0);
            for &axis in &dimension.0 {
                let size = self.axis_size(axis, stacked, tensor.parts, live, &info.name)?;
                known[axis as usize] = size;
                match size {
                    Some(size) => product = product.checked_mul(size).ok_or_else(too_large)?,
                    None => open += 1,
                }
            }
            let fits = match open {
                0 => product == size,
                1 => product > 0 && size.is_multiple_of(product),
                _ => return Err(self.problem(format!("`{pattern}` leaves two sizes of one dimension open"))),
            };
            if !fits {
                return Err(axis_size_error(info, &dimension.0, product, size));
            }
            let mut stride_bytes = stride;
            for &axis in dimension.0.iter().rev() {
                let size = known[axis as usize].unwrap_or(size / product.max(1));
                axes.0[axis as usize] = Some(Bind { size, stride_bytes });
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

    /// An axis that is absent must not be needed: elements would share bytes.
    fn check_absent(&self, tensor: &RuleTensor, stacked: &[usize]) -> Result<(), LayoutError> {
        let rule = self.rule;
        let heads = stacked.iter().map(|&l| heads_of(&self.cache.layers[l])).max().unwrap_or(0);
        let apart = rule.axes.has(Axis::KvHead) || tensor.head.is_some();
        if self.shares_scales() && apart {
            return Err(
                self.problem(format!("tensor `{}` tells heads apart, which share its scales", rule.name.0))
            );
        }
        let needed = rule.holds != Holds::Conv && heads > 1 && !self.shares_scales();
        if needed && !apart {
            return Err(
                self.problem(format!("tensor `{}` lacks the axis kv_head, for {heads} heads", rule.name.0))
            );
        }
        Ok(())
    }

    /// Whether its tensors hold scales of all heads of a token.
    pub(crate) fn shares_scales(&self) -> bool {
        self.rule.encoding == Encoding::Int8PerToken && self.rule.role == Role::Scale
    }

    /// The size that the model gives an axis; `None` where the tensor decides.
    pub(crate) fn axis_size(
        &self,
        axis: Axis,
        stacked: &[usize],
        parts: &[Part],
        live: &LiveRows,
        tensor: &str,
    ) -> Result<Option<usize>, LayoutError> {
        let uniform = |of: &dyn Fn(&LayerSpec, Part) -> Result<usize, LayoutError>| {
            let mut first = None;
            for &layer in stacked {
                for &part in parts {
                    let other = of(&self.cache.layers[layer], part)?;
                    match first {
                        None => first = Some(other),
                        Some(first) if first != other => {
                            let tensor = tensor.to_owned();
                            return Err(LayoutError::MixedLayers { tensor, axis, first, other });
                        }
                        Some(_) => {}
                    }
                }
            }
            Ok(Some(first.unwrap_or(0)))
        };
        let recurrent = |spec: &LayerSpec| match *spec {
            LayerSpec::Recurrent { conv_channels, value_dim, key_dim, .. } => {
                (conv_channels, value_dim, key_dim)
            }
            _ => (0, 0, 0),
        };
        match axis {
            Axis::Batch => Ok(if live.sequence.is_some() { None } else { Some(1) }),
            Axis::Layer => Ok(Some(stacked.len())),
            Axis::Part => Ok(Some(parts.len())),
            Axis::KvHead => uniform(&|spec, _| Ok(heads_of(spec))),
            Axis::HeadDim => match self.rule.padded_head_dim {
                Some(padded) => {
                    uniform(&|spec, part| self.stored_lanes(spec, part)).or_else(|e| {
                        if matches!(e, LayoutError::MixedLayers { .. }) { Ok(None) } else { Err(e) }
                    })?;
                    self.stored(padded).map(Some)
                }
                None => uniform(&|spec, part| self.stored_lanes(spec, part)),
            },
            Axis::Channel => uniform(&|spec, _| Ok(recurrent(spec).0)),
            Axis::ValueDim => uniform(&|spec, _| Ok(recurrent(spec).1)),
            Axis::KeyDim => uniform(&|spec, _| Ok(recurrent(spec).2)),
            Axis::Row | Axis::Block => Ok(None),
        }
    }

    /// Where the live rows of a layer are: runs of consecutive positions in consecutive slots.
    pub(crate) fn runs(
        &self,
        layer: usize,
        part: Part,
        slots: usize,
        blocks: usize,
        live: &LiveRows,
    ) -> Result<Vec<Run>, LayoutError> {
        let spec = &self.cache.layers[layer];
        let placed = Placed { layer, slots, blocks, live: live.of_layer(layer), window: spec.window() };
        match (part, spec) {
            (Part::Conv, LayerSpec::Recurrent { conv_steps, .. }) => {
                placed.conv_runs(*conv_steps, self.rule.placement)
            }
            _ => placed.runs(self.placement(spec)),
        }
    }

    /// The placement of an attention layer's rows.
    pub(crate) fn placement(&self, spec: &LayerSpec) -> Placement {
        self.rule.placement_of(self.layout, spec.window().is_some())
    }
}

/// The parts that a layer keeps.
pub(crate) fn parts_of(spec: &LayerSpec) -> &'static [Part] {
    match spec {
        LayerSpec::Full { .. } | LayerSpec::Sliding { .. } => &[Part::Key, Part::Value],
        LayerSpec::Recurrent { conv_steps: 0, heads: 0, .. } => &[],
        LayerSpec::Recurrent { conv_steps: 0, .. } => &[Part::State],
        LayerSpec::Recurrent { heads: 0, .. } => &[Part::Conv],
        LayerSpec::Recurrent { .. } => &[Part::Conv, Part::State],
        LayerSpec::Shared { .. } => &[],
    }
}

pub(crate) fn heads_of(spec: &LayerSpec) -> usize {
    match spec {
        LayerSpec::Recurrent { heads, .. } => *heads,
        other => other.attention().map_or(0, |(heads, ..)| heads),
    }
}

pub(crate) fn axis_size_error(info: &TensorInfo, axes: &[Axis], want: usize, have: usize) -> LayoutError {
    let axis = match axes {
        [] => "1".to_owned(),
        some => AxisPattern::names(some),
    };
    LayoutError::AxisSize { tensor: info.name.clone(), axis, want, have }
}
