//! Names of tensors, with places for what distinguishes them.

use serde::{Deserialize, Serialize};

/// A tensor name with places: `past_key_{layer}`, `l{layer},h{kv_head}`, `{keys|values}_{layer}`.
///
/// | place | stands for |
/// |---|---|
/// | `{layer}` | the model's number of the layer |
/// | `{index}` | the layer's number among those of the rule |
/// | `{group}` | the number of a group of layers |
/// | `{kv_head}` | the KV head |
/// | `{a\|b}` | `a` for keys, `b` for values |
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NameTemplate(pub String);

/// What a name's places stand for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NamePlaces {
    pub(crate) layer: usize,
    pub(crate) index: usize,
    pub(crate) group: usize,
    pub(crate) kv_head: usize,
    pub(crate) value: bool,
}

impl NameTemplate {
    /// Whether every layer has a tensor of its own.
    pub fn is_per_layer(&self) -> bool {
        self.0.contains("{layer}") || self.0.contains("{index}")
    }

    /// Whether every group of layers has a tensor of its own.
    pub fn is_per_group(&self) -> bool {
        self.0.contains("{group}")
    }

    /// Whether every KV head has a tensor of its own.
    pub fn is_per_head(&self) -> bool {
        self.0.contains("{kv_head}")
    }

    /// Whether keys and values have tensors of their own.
    pub fn is_per_part(&self) -> bool {
        self.0.contains('|')
    }

    /// What is wrong with it.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.0.is_empty() {
            return Some("a tensor without a name".to_owned());
        }
        let mut rest = self.0.as_str();
        loop {
            let Some(open) = rest.find('{') else {
                return rest.contains('}').then(|| format!("`}}` without `{{` in the name `{}`", self.0));
            };
            if rest[..open].contains('}') {
                return Some(format!("`}}` without `{{` in the name `{}`", self.0));
            }
            let Some(length) = rest[open..].find('}') else {
                return Some(format!("`{{` without `}}` in the name `{}`", self.0));
            };
            let place = &rest[open + 1..open + length];
            let known = matches!(place, "layer" | "index" | "group" | "kv_head")
                || (place.matches('|').count() == 1 && !place.contains('{'));
            if !known {
                return Some(format!("`{{{place}}}` in the name `{}` stands for nothing", self.0));
            }
            rest = &rest[open + length + 1..];
        }
    }

    /// The name with its places filled. The template has no [`NameTemplate::problem`].
    pub(crate) fn fill(&self, at: NamePlaces) -> String {
        let mut name = String::with_capacity(self.0.len() + 4);
        let mut rest = self.0.as_str();
        while let Some((before, after)) = rest.split_once('{') {
            name.push_str(before);
            let (place, after) = after.split_once('}').unwrap_or((after, ""));
            match place {
                "layer" => push_number(&mut name, at.layer),
                "index" => push_number(&mut name, at.index),
                "group" => push_number(&mut name, at.group),
                "kv_head" => push_number(&mut name, at.kv_head),
                _ => {
                    let (key, value) = place.split_once('|').unwrap_or((place, place));
                    name.push_str(if at.value { value } else { key });
                }
            }
            rest = after;
        }
        name.push_str(rest);
        name
    }
}

/// Appends a number; a layout has many names and few digits.
fn push_number(name: &mut String, number: usize) {
    if number >= 10 {
        push_number(name, number / 10);
    }
    name.push(char::from(b"0123456789"[number % 10]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_filled() {
        let at = NamePlaces { layer: 120, index: 7, group: 2, kv_head: 0, value: true };
        for (template, name) in [
            ("cache", "cache"),
            ("past_key_{layer}", "past_key_120"),
            ("k{index}", "k7"),
            ("{group}/kv", "2/kv"),
            ("l{layer},h{kv_head}", "l120,h0"),
            ("{keys|values}_{layer}.0", "values_120.0"),
        ] {
            let template = NameTemplate(template.to_owned());
            assert_eq!(template.problem(), None);
            assert_eq!(template.fill(at), name);
        }
        let keys = NameTemplate("{K|V}_in".to_owned());
        assert_eq!(keys.fill(NamePlaces::default()), "K_in");
    }

    #[test]
    fn malformed_names_say_what_is_wrong() {
        for (name, says) in [
            ("", "without a name"),
            ("k{layer", "`{` without `}`"),
            ("k}_{layer}", "`}` without `{`"),
            ("k{layer}}", "`}` without `{`"),
            ("k_{head}", "`{head}` in the name `k_{head}` stands for nothing"),
            ("{a|b|c}", "stands for nothing"),
            ("{{layer}}", "stands for nothing"),
        ] {
            let problem = NameTemplate(name.to_owned()).problem().expect("it is malformed");
            assert!(problem.contains(says), "{name}: {problem}");
        }
    }
}
