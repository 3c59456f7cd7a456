//! The layout language: rules that say which tensor holds what, and how they are written down as TOML.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Axis, AxisPattern, DType, LayoutError};

/// What a tensor, or a block of one, holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Keys, after rotary embedding.
    Key,
    /// Values.
    Value,
    /// The convolution state of a recurrent layer.
    Conv,
    /// The recurrent state of a recurrent layer.
    State,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Key => "keys",
            Part::Value => "values",
            Part::Conv => "convolution state",
            Part::State => "recurrent state",
        })
    }
}

/// What a rule's tensors hold: one part, or keys and values along the `part` axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Holds {
    Key,
    Value,
    Conv,
    State,
    KeyAndValue,
}

/// Which slot holds which token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// The oldest live row is in slot 0.
    #[default]
    Left,
    /// The newest row is in the last slot.
    Right,
    /// The row of position `p` is in slot `p % capacity`.
    Ring,
    /// The first `keep` slots stay; the others are a ring whose oldest row the producer names.
    RingIndexed,
    /// Left, after a stated number of padding slots.
    LeftPadded,
    /// Blocks of rows, in the order of a block table.
    Paged,
}

/// How elements are encoded, and what a tensor is within that encoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encoding {
    /// The element type itself.
    #[default]
    Plain,
    /// Signed bytes times a scale for each token and head.
    Int8PerTokenHead,
    /// Signed bytes times a scale for each token.
    Int8PerToken,
    /// MLX's affine codes: `scale · code + bias` for each group of lanes.
    #[serde(untagged)]
    Affine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Lanes that share a scale: 32, 64 or 128.
        group_size: usize,
    },
}

/// What a tensor is within its encoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The elements, or their codes.
    #[default]
    Elements,
    /// The scales of the codes.
    Scale,
    /// The biases of the codes.
    Bias,
}

/// Which layers a rule speaks of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerSet {
    /// Every layer that keeps something of the rule's kind.
    #[default]
    All,
    /// Layers of full attention.
    Full,
    /// Layers with a window.
    Sliding,
    /// Recurrent layers.
    Recurrent,
    /// These, in the order in which the tensor stacks them.
    #[serde(untagged)]
    List(Vec<usize>),
}

/// A tensor name with places for a layer, a head and a layer's ordinal: `past_key_{layer}`, `l{layer},h{kv_head}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NameTemplate(pub String);

impl NameTemplate {
    /// Whether every layer has a tensor of its own: `{layer}` is the model's number, `{index}` counts the
    /// rule's layers.
    pub fn is_per_layer(&self) -> bool {
        self.0.contains("{layer}") || self.0.contains("{index}")
    }

    /// Whether every KV head has a tensor of its own.
    pub fn is_per_head(&self) -> bool {
        self.0.contains("{kv_head}")
    }

    /// The name for one layer (and its ordinal in the rule) and head.
    pub fn fill(&self, layer: usize, index: usize, kv_head: usize) -> String {
        self.0
            .replace("{layer}", &layer.to_string())
            .replace("{index}", &index.to_string())
            .replace("{kv_head}", &kv_head.to_string())
    }
}

/// One rule: the tensors that hold a part of some layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRule {
    /// The tensors' names.
    pub name: NameTemplate,
    holds: Holds,
    /// Their dimensions.
    pub axes: AxisPattern,
    /// Type of the stored elements; what the tensors have when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
    /// The layers they hold.
    #[serde(default, skip_serializing_if = "is_default")]
    pub layers: LayerSet,
    /// Which slot holds which token; the layout's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Lanes that a head occupies when it is padded; the first `head_dim` are real.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padded_head_dim: Option<usize>,
    /// How elements are encoded.
    #[serde(default, skip_serializing_if = "is_default")]
    pub encoding: Encoding,
    /// What these tensors are within the encoding.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
}

impl TensorRule {
    /// The parts it holds, in the order of the `part` axis.
    pub fn parts(&self) -> &'static [Part] {
        match self.holds {
            Holds::Key => &[Part::Key],
            Holds::Value => &[Part::Value],
            Holds::Conv => &[Part::Conv],
            Holds::State => &[Part::State],
            Holds::KeyAndValue => &[Part::Key, Part::Value],
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The names of a program's own inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    /// Token ids, `(1, S)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<String>,
    /// Index of the last live token, `(1,)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_index: Option<String>,
    /// Positions of the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<String>,
    /// Additive attention mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
}

/// The names of a program's own outputs, the cache aside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outputs {
    /// Logits of the last live position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<String>,
}

/// How a whole model's cache is spread over named tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Its name, in kebab case.
    pub name: String,
    /// A sentence on where it comes from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Which slot holds which token, unless a rule says otherwise.
    #[serde(default)]
    pub placement: Placement,
    /// Names of the program's inputs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub inputs: Inputs,
    /// Names of the program's outputs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub outputs: Outputs,
    /// The rules.
    #[serde(rename = "tensor")]
    pub tensors: Vec<TensorRule>,
}

impl Layout {
    /// Reads a layout from TOML and checks its rules.
    ///
    /// # Errors
    ///
    /// When the text is no TOML, names an unknown key or axis, or has a rule that cannot hold.
    pub fn from_toml(text: &str) -> Result<Layout, LayoutError> {
        let layout: Layout = toml::from_str(text)
            .map_err(|e| LayoutError::BadToml { problem: e.to_string().trim_end().to_owned() })?;
        layout.check()?;
        Ok(layout)
    }

    /// The layout as TOML; [`Layout::from_toml`] reads it back exactly.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a layout is plain strings, numbers and lists")
    }

    fn check(&self) -> Result<(), LayoutError> {
        let error = |problem: String| LayoutError::BadLayout { layout: self.name.clone(), problem };
        if self.tensors.is_empty() {
            return Err(error("it has no tensors".to_owned()));
        }
        for rule in &self.tensors {
            let name = &rule.name.0;
            let needs = |axis: Axis, wanted: bool, why: &str| {
                if rule.axes.has(axis) == wanted {
                    Ok(())
                } else {
                    let has = if wanted { "lacks" } else { "has" };
                    Err(error(format!("tensor `{name}` {has} the axis {axis}, {why}")))
                }
            };
            match rule.holds {
                Holds::KeyAndValue => needs(Axis::Part, true, "it holds keys and values")?,
                _ => needs(Axis::Part, false, "it holds one part")?,
            }
            match rule.holds {
                Holds::Key | Holds::Value | Holds::KeyAndValue => {
                    needs(Axis::Row, true, "a row is a token's")?;
                    if rule.role == Role::Elements {
                        needs(Axis::HeadDim, true, "a head has lanes")?;
                    }
                    for axis in [Axis::Channel, Axis::ValueDim, Axis::KeyDim] {
                        needs(axis, false, "which recurrent layers have")?;
                    }
                }
                Holds::Conv => {
                    needs(Axis::Row, true, "a convolution state has steps")?;
                    needs(Axis::Channel, true, "a convolution state has channels")?;
                }
                Holds::State => {
                    needs(Axis::ValueDim, true, "a recurrent state has value lanes")?;
                    needs(Axis::KeyDim, true, "a recurrent state has key lanes")?;
                    needs(Axis::Row, false, "a recurrent state has no rows")?;
                }
            }
            if rule.name.is_per_layer() {
                needs(Axis::Layer, false, "every layer has a tensor of its own")?;
            }
            if rule.name.is_per_head() {
                needs(Axis::KvHead, false, "every head has a tensor of its own")?;
            }
            let placement = rule.placement.unwrap_or(self.placement);
            needs(Axis::Block, placement == Placement::Paged, "which is for paged placement")?;
        }
        Ok(())
    }
}
