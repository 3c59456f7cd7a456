//! What a model keeps, from the shapes of tensors whose layout is stated.

use crate::bind::axis_size_error;
use crate::names::NamePlaces;
use crate::{
    Axis, CacheSpec, LayerSet, LayerSpec, Layout, LayoutError, Part, Placement, Role, TensorInfo, TensorRule,
};

impl Layout {
    /// What a model of full attention keeps, from the shapes of its tensors: the number of layers, heads and lanes.
    ///
    /// The layout says what each dimension is; nothing is guessed. A layout that leaves a size open is refused: one
    /// with windows or recurrent states, with padded heads, or with a dimension of several unknown sizes, such as
    /// heads stacked in channels.
    ///
    /// # Errors
    ///
    /// When the layout leaves a size open, when tensors are missing, or when two tensors differ.
    pub fn infer_cache(&self, tensors: &[TensorInfo]) -> Result<CacheSpec, LayoutError> {
        let mut layers: Vec<Sizes> = Vec::new();
        for rule in self.tensors.iter().filter(|r| r.role == Role::Elements) {
            self.check_open(rule)?;
            self.infer_rule(rule, tensors, &mut layers)?;
        }
        if layers.is_empty() {
            return Err(self.open("there are no tensors of it to take sizes from".to_owned()));
        }
        let cache = layers
            .into_iter()
            .enumerate()
            .map(|(layer, sizes)| match (sizes.heads, sizes.key, sizes.value) {
                (Some(kv_heads), Some(key_dim), Some(value_dim)) => {
                    Ok(LayerSpec::Full { kv_heads, key_dim, value_dim })
                }
                (_, None, _) => Err(LayoutError::Uncovered { layer, part: Part::Key }),
                (_, _, None) => Err(LayoutError::Uncovered { layer, part: Part::Value }),
                (None, ..) => Err(self.open(format!("the heads of layer {layer} are open"))),
            })
            .collect::<Result<_, _>>()?;
        Ok(CacheSpec { layers: cache })
    }

    fn open(&self, problem: String) -> LayoutError {
        LayoutError::Open { layout: self.name.clone(), problem }
    }

    fn check_open(&self, rule: &TensorRule) -> Result<(), LayoutError> {
        let name = &rule.name.0;
        if !matches!(rule.parts()[0], Part::Key | Part::Value) {
            return Err(self.open(format!("tensor `{name}` holds states of recurrent layers")));
        }
        let moving = [Placement::Right, Placement::Ring, Placement::RingIndexed, Placement::RingFrom];
        let windowed = self.sliding_placement.is_some() || rule.sliding_placement.is_some();
        if matches!(rule.layers, LayerSet::Sliding) {
            return Err(
                self.open(format!("tensor `{name}` has layers with windows, of sizes it does not say"))
            );
        }
        if !matches!(rule.layers, LayerSet::Full)
            && (windowed || moving.contains(&rule.placement_of(self, false)))
        {
            return Err(self.open(format!("which layers of tensor `{name}` have windows is not said")));
        }
        if rule.padded_head_dim.is_some() {
            return Err(self.open(format!("the heads of tensor `{name}` are padded")));
        }
        Ok(())
    }

    fn infer_rule(
        &self,
        rule: &TensorRule,
        tensors: &[TensorInfo],
        layers: &mut Vec<Sizes>,
    ) -> Result<(), LayoutError> {
        let parts = rule.parts();
        let apart = rule.name.is_per_part();
        for (number, &part) in parts.iter().enumerate().take(if apart { parts.len() } else { 1 }) {
            let held = if apart { &parts[number..=number] } else { parts };
            let (mut layer, mut step) = (0, 0);
            loop {
                let number = match &rule.layers {
                    LayerSet::List(list) => list.get(layer).copied(),
                    _ => Some(layer),
                };
                let Some(number) = number else { break };
                let name = |kv_head| {
                    let at = NamePlaces {
                        layer: number,
                        index: step,
                        group: step,
                        kv_head,
                        value: part == Part::Value,
                    };
                    rule.name.fill(at)
                };
                let Some(info) = tensors.iter().find(|t| t.name == name(0)) else { break };
                let mut sizes = self.sizes(rule, info, held.len())?;
                if rule.name.is_per_head() {
                    let heads = (0..).take_while(|&h| tensors.iter().any(|t| t.name == name(h))).count();
                    sizes.heads = Some(heads);
                }
                let stacked = sizes.layers;
                let numbers: Vec<usize> = match &rule.layers {
                    LayerSet::List(list) => list.iter().skip(layer).take(stacked).copied().collect(),
                    _ => (layer..layer + stacked).collect(),
                };
                if numbers.len() < stacked {
                    return Err(axis_size_error(info, &[Axis::Layer], numbers.len(), stacked));
                }
                for layer in numbers {
                    if layer >= layers.len() {
                        layers.resize_with(layer + 1, Sizes::default);
                    }
                    layers[layer].merge(info, held, &sizes)?;
                }
                layer += stacked;
                step += 1;
                if !(rule.name.is_per_layer() || rule.name.is_per_group()) {
                    break;
                }
            }
            if step == 0 {
                return Err(LayoutError::MissingTensor {
                    layout: self.name.clone(),
                    tensor: rule
                        .name
                        .fill(NamePlaces { value: part == Part::Value, ..NamePlaces::default() }),
                    have: tensors.iter().map(|t| format!("`{}`", t.name)).collect::<Vec<_>>().join(", "),
                });
            }
        }
        Ok(())
    }

    /// The sizes that one tensor's shape says.
    fn sizes(&self, rule: &TensorRule, info: &TensorInfo, parts: usize) -> Result<Sizes, LayoutError> {
        let dimensions = rule.axes.dimensions();
        if dimensions.len() != info.shape.len() {
            let (tensor, pattern) = (info.name.clone(), rule.axes.to_string());
            return Err(LayoutError::Rank {
                tensor,
                pattern,
                want: dimensions.len(),
                have: info.shape.len(),
            });
        }
        let mut sizes = Sizes { layers: 1, ..Sizes::default() };
        if !rule.axes.has(Axis::KvHead) && !rule.name.is_per_head() {
            sizes.heads = Some(1);
        }
        for (dimension, &size) in dimensions.iter().zip(&info.shape) {
            let known: usize = dimension.0.iter().map(|a| if *a == Axis::Part { parts } else { 1 }).product();
            let mut open = dimension.0.iter().filter(|a| !matches!(a, Axis::Part | Axis::Batch));
            let (axis, more) = (open.next(), open.next());
            if more.is_some() {
                let axes = &rule.axes;
                return Err(self.open(format!("`{axes}` leaves several sizes of one dimension open")));
            }
            if size % known != 0 || (axis.is_none() && size != known) {
                return Err(axis_size_error(info, &dimension.0, known, size));
            }
            match axis {
                Some(Axis::Layer) => sizes.layers = size / known,
                Some(Axis::KvHead) => sizes.heads = Some(size / known),
                Some(Axis::HeadDim) => sizes.key = Some(rule.encoding.lanes(size / known)),
                _ => {}
            }
        }
        Ok(sizes)
    }
}

/// What is known of a layer, or of the layers of one tensor.
#[derive(Clone, Debug, Default)]
struct Sizes {
    layers: usize,
    heads: Option<usize>,
    key: Option<usize>,
    value: Option<usize>,
}

impl Sizes {
    /// Adds what a tensor says of the parts it holds; its lanes are in `key`.
    fn merge(&mut self, info: &TensorInfo, held: &[Part], tensor: &Sizes) -> Result<(), LayoutError> {
        match (self.heads, tensor.heads) {
            (Some(want), Some(have)) if want != have => {
                return Err(axis_size_error(info, &[Axis::KvHead], want, have));
            }
            _ => self.heads = self.heads.or(tensor.heads),
        }
        if held.contains(&Part::Key) {
            self.key = tensor.key;
        }
        if held.contains(&Part::Value) {
            self.value = tensor.key;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
