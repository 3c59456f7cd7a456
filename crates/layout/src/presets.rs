//! The layouts that ship with kvbaton, by name.

use crate::{Layout, LayoutError};

/// Name and text of every preset, in the order in which they are listed.
const PRESETS: &[(&str, &str)] = &[
    ("kvbaton-stacked", include_str!("../presets/kvbaton-stacked.toml")),
    ("kvbaton-per-layer", include_str!("../presets/kvbaton-per-layer.toml")),
    ("mlx-lm", include_str!("../presets/mlx-lm.toml")),
];

/// The names of all presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The TOML text of the preset called `name`.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}

/// The preset called `name`.
///
/// # Errors
///
/// When there is none.
pub fn get(name: &str) -> Result<Layout, LayoutError> {
    let text = text(name).ok_or_else(|| LayoutError::UnknownLayout { name: name.to_owned() })?;
    Layout::from_toml(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_reads_back_as_written() {
        for name in names() {
            let layout = get(name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(layout.name, name);
            assert_eq!(Layout::from_toml(&layout.to_toml()).unwrap(), layout);
        }
    }
}
