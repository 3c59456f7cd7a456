//! Named axes, and the patterns that bind them to a tensor's dimensions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::LayoutError;

/// One named axis of a cache tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Axis {
    /// Layers stacked in one tensor.
    Layer,
    /// Keys and values side by side in one tensor: K is 0, V is 1.
    Part,
    /// KV heads, or the heads of a recurrent state.
    KvHead,
    /// Slots for tokens; of a convolution state, its steps.
    Row,
    /// The lanes of one head.
    HeadDim,
    /// Always 1.
    Batch,
    /// Blocks of a paged cache.
    Block,
    /// Channels of a convolution state.
    Channel,
    /// Value lanes of a recurrent state.
    ValueDim,
    /// Key lanes of a recurrent state.
    KeyDim,
}

impl Axis {
    /// How many axes there are.
    pub(crate) const COUNT: usize = 10;

    const ALL: [Axis; Axis::COUNT] = [
        Axis::Layer,
        Axis::Part,
        Axis::KvHead,
        Axis::Row,
        Axis::HeadDim,
        Axis::Batch,
        Axis::Block,
        Axis::Channel,
        Axis::ValueDim,
        Axis::KeyDim,
    ];

    /// The name used in layouts and messages.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Layer => "layer",
            Axis::Part => "part",
            Axis::KvHead => "kv_head",
            Axis::Row => "row",
            Axis::HeadDim => "head_dim",
            Axis::Batch => "batch",
            Axis::Block => "block",
            Axis::Channel => "channel",
            Axis::ValueDim => "value_dim",
            Axis::KeyDim => "key_dim",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one dimension of a tensor is: axes multiplied together (outermost first), or a fixed 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Dimension(pub Vec<Axis>);

/// A tensor's dimensions, outermost first, in the notation of einops: `layer kv_head row head_dim`;
/// `(part layer) kv_head row head_dim` where K of every layer comes before V of every layer;
/// `(layer part) …` where they alternate; `batch (kv_head head_dim) 1 row` for channels first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AxisPattern {
    dimensions: Vec<Dimension>,
}

impl AxisPattern {
    /// The dimensions, outermost first.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    /// Names of axes in messages, as a product.
    pub(crate) fn names(axes: &[Axis]) -> String {
        axes.iter().map(|a| a.name()).collect::<Vec<_>>().join("·")
    }

    /// Whether `axis` is one of the pattern's.
    pub fn has(&self, axis: Axis) -> bool {
        self.dimensions.iter().any(|d| d.0.contains(&axis))
    }
}

impl FromStr for AxisPattern {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<AxisPattern, LayoutError> {
        let error = |problem: String| LayoutError::BadPattern { pattern: text.to_owned(), problem };
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let mut dimensions = Vec::new();
        let mut group: Option<Vec<Axis>> = None;
        let mut seen = Vec::new();
        for word in spaced.split_whitespace() {
            match (word, &mut group) {
                ("(", None) => group = Some(Vec::new()),
                ("(", Some(_)) => return Err(error("a group inside a group".to_owned())),
                (")", None) => return Err(error("`)` without `(`".to_owned())),
                (")", Some(_)) => {
                    let axes = group.take().expect("matched as Some");
                    if axes.is_empty() {
                        return Err(error("an empty group".to_owned()));
                    }
                    dimensions.push(Dimension(axes));
                }
                ("1", None) => dimensions.push(Dimension(Vec::new())),
                (name, group) => {
                    let axis = Axis::ALL
                        .into_iter()
                        .find(|a| a.name() == name)
                        .ok_or_else(|| error(format!("`{name}` is no axis")))?;
                    if seen.contains(&axis) {
                        return Err(error(format!("`{name}` appears twice")));
                    }
                    seen.push(axis);
                    match group {
                        Some(axes) => axes.push(axis),
                        None => dimensions.push(Dimension(vec![axis])),
                    }
                }
            }
        }
        if group.is_some() {
            return Err(error("`(` without `)`".to_owned()));
        }
        if dimensions.is_empty() {
            return Err(error("no axes".to_owned()));
        }
        Ok(AxisPattern { dimensions })
    }
}

impl fmt::Display for AxisPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, Dimension(axes)) in self.dimensions.iter().enumerate() {
            if i > 0 {
                f.write_str(" ")?;
            }
            let names: Vec<_> = axes.iter().map(|a| a.name()).collect();
            match names.len() {
                0 => f.write_str("1")?,
                1 => f.write_str(names[0])?,
                _ => write!(f, "({})", names.join(" "))?,
            }
        }
        Ok(())
    }
}

impl TryFrom<String> for AxisPattern {
    type Error = LayoutError;

    fn try_from(text: String) -> Result<AxisPattern, LayoutError> {
        text.parse()
    }
}

impl From<AxisPattern> for String {
    fn from(pattern: AxisPattern) -> String {
        pattern.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_read_back_as_written() {
        for text in [
            "layer kv_head row head_dim",
            "(part layer) kv_head row head_dim",
            "batch (kv_head head_dim) 1 row",
            "block part row kv_head head_dim",
        ] {
            assert_eq!(text.parse::<AxisPattern>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn malformed_patterns_say_what_is_wrong() {
        for (text, problem) in [
            ("", "no axes"),
            ("row (head_dim", "`(` without `)`"),
            ("row) head_dim", "`)` without `(`"),
            ("row ((head_dim))", "a group inside a group"),
            ("row ()", "an empty group"),
            ("row row", "`row` appears twice"),
            ("token head_dim", "`token` is no axis"),
        ] {
            let error = text.parse::<AxisPattern>().unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
