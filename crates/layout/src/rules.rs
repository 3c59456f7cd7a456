//! The layout language: rules that say which tensor holds what, and how they are written down as TOML.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Axis, AxisPattern, DType, Encoding, LayoutError, NameTemplate, Placement, Role};

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
pub(crate) enum Holds {
    Key,
    Value,
    Conv,
    State,
    KeyAndValue,
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

/// One rule: the tensors that hold a part of some layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRule {
    /// The tensors' names.
    pub name: NameTemplate,
    pub(crate) holds: Holds,
    /// Their dimensions.
    pub axes: AxisPattern,
    /// Type of the stored elements; what the tensors have when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
    /// The layers they hold.
    #[serde(default, skip_serializing_if = "is_default")]
    pub layers: LayerSet,
    /// Layers of one tensor, where the name has `{group}`: the first tensor holds the first so many, and so on.
    /// When absent, each tensor holds as many as its shape says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_layers: Option<usize>,
    /// Which slot holds which token; the layout's own when absent. Steps of a convolution state do not follow the
    /// layout's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// The same for layers with a window, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_placement: Option<Placement>,
    /// Slots beyond those that a layer needs: 1 for a convolution state as long as its kernel.
    #[serde(default, skip_serializing_if = "is_default")]
    pub extra_rows: usize,
    /// Lanes that a head occupies when it is padded; the first `head_dim` are real, the others zero.
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
    /// The parts it holds; with a `part` axis, in its order.
    pub fn parts(&self) -> &'static [Part] {
        match self.holds {
            Holds::Key => &[Part::Key],
            Holds::Value => &[Part::Value],
            Holds::Conv => &[Part::Conv],
            Holds::State => &[Part::State],
            Holds::KeyAndValue => &[Part::Key, Part::Value],
        }
    }

    /// Type of the stored elements, where the rule or its encoding fixes it.
    pub fn element_type(&self) -> Option<DType> {
        match self.role {
            Role::Elements => self.dtype.or(self.encoding.dtype()),
            Role::Scale | Role::Bias => self.dtype,
        }
    }

    /// What is wrong with it, whatever the model.
    fn problem(&self, layout: &Layout) -> Option<String> {
        let name = &self.name.0;
        if let Some(problem) = self.name.problem() {
            return Some(problem);
        }
        let needs = |axis: Axis, wanted: bool, why: &str| {
            let has = if wanted { "lacks" } else { "has" };
            (self.axes.has(axis) != wanted).then(|| format!("tensor `{name}` {has} the axis {axis}, {why}"))
        };
        let per_part = self.name.is_per_part();
        let of_part = match self.holds {
            Holds::KeyAndValue if per_part => {
                needs(Axis::Part, false, "keys and values have tensors of their own")
            }
            Holds::KeyAndValue => needs(Axis::Part, true, "it holds keys and values"),
            _ if per_part => {
                Some(format!("tensor `{name}` names keys and values, and holds only one of them"))
            }
            _ => needs(Axis::Part, false, "it holds one part"),
        };
        let recurrent = [Axis::Channel, Axis::ValueDim, Axis::KeyDim];
        let of_kind = match self.holds {
            Holds::Key | Holds::Value | Holds::KeyAndValue => (!self.axes.has(Axis::Block))
                .then(|| needs(Axis::Row, true, "a row is a token's"))
                .flatten()
                .or_else(|| {
                    needs(Axis::HeadDim, true, "a head has lanes").filter(|_| self.role == Role::Elements)
                })
                .or_else(|| recurrent.iter().find_map(|&a| needs(a, false, "which recurrent layers have"))),
            Holds::Conv => needs(Axis::Row, true, "a convolution state has steps")
                .or_else(|| needs(Axis::Channel, true, "a convolution state has channels"))
                .or_else(|| needs(Axis::KvHead, false, "a convolution state has channels instead"))
                .or_else(|| needs(Axis::HeadDim, false, "a convolution state has channels instead")),
            Holds::State => needs(Axis::ValueDim, true, "a recurrent state has value lanes")
                .or_else(|| needs(Axis::KeyDim, true, "a recurrent state has key lanes"))
                .or_else(|| needs(Axis::Row, false, "a recurrent state has no rows")),
        };
        let layered = self.name.is_per_layer();
        let of_name = match (layered, self.name.is_per_group()) {
            (true, true) => Some(format!("tensor `{name}` is named by layer and by group")),
            (true, false) => needs(Axis::Layer, false, "every layer has a tensor of its own"),
            (false, true) => needs(Axis::Layer, true, "a group has several layers"),
            (false, false) => None,
        };
        let of_head = if self.name.is_per_head() {
            needs(Axis::KvHead, false, "every head has a tensor of its own")
        } else {
            None
        };
        of_part
            .or(of_kind)
            .or(of_name)
            .or(of_head)
            .or_else(|| self.placement_problem(layout))
            .or_else(|| self.encoding_problem())
    }

    fn placement_problem(&self, layout: &Layout) -> Option<String> {
        let name = &self.name.0;
        let used = match (self.holds, &self.layers) {
            (Holds::Conv | Holds::State, _) => [self.placement.unwrap_or_default(); 2],
            (_, LayerSet::Full) => [self.placement_of(layout, false); 2],
            (_, LayerSet::Sliding) => [self.placement_of(layout, true); 2],
            _ => [self.placement_of(layout, false), self.placement_of(layout, true)],
        };
        let paged = used.map(|p| p == Placement::Paged);
        if paged != [self.axes.has(Axis::Block); 2] {
            let has = if self.axes.has(Axis::Block) { "has" } else { "lacks" };
            return Some(format!("tensor `{name}` {has} the axis block, which is for paged placement"));
        }
        match self.group_layers {
            Some(_) if !self.name.is_per_group() => {
                Some(format!("tensor `{name}` says the layers of a group and has no {{group}} in its name"))
            }
            Some(0) => Some(format!("tensor `{name}` has groups of no layers")),
            _ => None,
        }
    }

    fn encoding_problem(&self) -> Option<String> {
        let name = &self.name.0;
        let problem = |text: String| Some(format!("tensor `{name}`: {text}"));
        if let Some(text) = self.encoding.problem() {
            return problem(text);
        }
        if !self.encoding.roles().contains(&self.role) {
            return problem(format!("{} elements have no {}", self.encoding, self.role.name()));
        }
        if self.encoding != Encoding::Plain && matches!(self.holds, Holds::Conv | Holds::State) {
            return problem(format!("a recurrent state is not {}", self.encoding));
        }
        if self.role != Role::Elements {
            return match self.dtype {
                Some(DType::Int8 | DType::UInt32) => problem(format!("{} are floats", self.role.name())),
                _ => None,
            };
        }
        match (self.dtype, self.encoding.dtype()) {
            (Some(have), Some(want)) if have != want => {
                problem(format!("{} elements are {want}, not {have}", self.encoding))
            }
            (Some(have @ (DType::Int8 | DType::UInt32)), None) => {
                problem(format!("plain elements are floats, not {have}"))
            }
            _ => None,
        }
    }

    /// The placement of a layer's rows.
    pub(crate) fn placement_of(&self, layout: &Layout, sliding: bool) -> Placement {
        let own = if sliding { self.sliding_placement.or(self.placement) } else { self.placement };
        let all = if sliding { layout.sliding_placement } else { None };
        own.or(all).unwrap_or(layout.placement)
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
    /// Hidden states, `(1, S, hidden)`, that the package before it in a chain leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<String>,
    /// Index of the last live token, `(1,)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_index: Option<String>,
    /// Positions of the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<String>,
    /// Position of the first token, `(1,)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<String>,
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
    /// Hidden states that the next package of a chain takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<String>,
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
    /// The same for layers with a window, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_placement: Option<Placement>,
    /// Whether it holds only some of a model's layers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub partial: bool,
    /// Names of the program's inputs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub inputs: Inputs,
    /// Names of the program's outputs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub outputs: Outputs,
    /// The rules; none in a part of a model that keeps no cache.
    #[serde(rename = "tensor", default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorRule>,
}

impl Layout {
    /// Whether rows of some tensor are placed in one of these ways.
    pub fn places(&self, ways: &[Placement]) -> bool {
        let placed = |rule: &TensorRule| [false, true].map(|sliding| rule.placement_of(self, sliding));
        self.tensors.iter().flat_map(placed).any(|placement| ways.contains(&placement))
    }

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

    /// The layout with the elements of its affine tensors in codes of `bits` bits and groups of `group_size`.
    ///
    /// # Errors
    ///
    /// When MLX has no such codes, or when the layout has no affine tensors.
    pub fn with_affine(&self, bits: u8, group_size: usize) -> Result<Layout, LayoutError> {
        let mut layout = self.clone();
        let mut changed = false;
        for rule in &mut layout.tensors {
            if matches!(rule.encoding, Encoding::Affine { .. }) {
                rule.encoding = Encoding::Affine { bits, group_size };
                changed = true;
            }
        }
        if !changed {
            let problem = "it has no tensors of affine codes".to_owned();
            return Err(LayoutError::BadLayout { layout: self.name.clone(), problem });
        }
        layout.check()?;
        Ok(layout)
    }

    fn check(&self) -> Result<(), LayoutError> {
        let error = |problem: String| Err(LayoutError::BadLayout { layout: self.name.clone(), problem });
        // A part of a model may keep no cache: its embeddings, or its head.
        if self.tensors.is_empty() && !self.partial {
            return error("it has no tensors".to_owned());
        }
        match self.tensors.iter().find_map(|rule| rule.problem(self)) {
            Some(problem) => error(problem),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
