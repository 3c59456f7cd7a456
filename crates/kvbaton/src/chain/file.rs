//! `chain.toml`: the packages in the order in which a prompt passes them, and what they do not state themselves.

use std::path::{Path, PathBuf};

use kvbaton_layout::{Layout, presets};
use serde::Deserialize;

use crate::{Error, ErrorKind};

/// A chain as it is written down. Nothing that it names has been looked at.
#[derive(Debug)]
pub struct ChainFile {
    /// The layout of the whole cache, where packages do not state theirs. Where its names begin with `{group}/`, the
    /// tensor `t` of the n-th package that has a cache is `n/t`.
    pub layout: Option<StatedLayout>,
    /// The packages, at least one.
    pub stages: Vec<StageFile>,
}

/// One package of a chain.
#[derive(Debug)]
pub struct StageFile {
    /// The package, relative to the chain's folder.
    pub package: PathBuf,
    /// The function that prefills, where the package does not say.
    pub function: Option<String>,
    /// The package's inputs, outputs and tensors, where it does not state them.
    pub layout: Option<StatedLayout>,
}

/// A layout, as a chain states it.
#[derive(Debug)]
pub enum StatedLayout {
    /// A preset, or a file relative to the chain's folder.
    Named(String),
    /// Written out in the chain.
    Written(Box<Layout>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawChain {
    /// Version of the file's form.
    format: u32,
    layout: Option<toml::Value>,
    #[serde(default)]
    stage: Vec<RawStage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStage {
    package: PathBuf,
    function: Option<String>,
    layout: Option<toml::Value>,
}

impl ChainFile {
    /// Reads a `chain.toml`.
    ///
    /// # Errors
    ///
    /// When it cannot be read, and as [`ChainFile::parse`]; the message names the file.
    pub fn read(file: &Path) -> Result<ChainFile, Error> {
        let text = std::fs::read_to_string(file)
            .map_err(|e| Error::new(ErrorKind::Package, format!("`{}`: {e}", file.display())))?;
        ChainFile::parse(&text).map_err(|e| Error::new(e.kind(), format!("`{}`: {e}", file.display())))
    }

    /// Reads the text of a `chain.toml`.
    ///
    /// # Errors
    ///
    /// When it is not TOML of this form (the message names the line), has another format than 1 or no stage, or a layout
    /// that is written out is none.
    pub fn parse(text: &str) -> Result<ChainFile, Error> {
        let wrong = |what: String| Error::new(ErrorKind::Package, what);
        let raw: RawChain = toml::from_str(text).map_err(|e| {
            let before = e.span().and_then(|s| text.get(..s.start)).unwrap_or_default();
            wrong(format!("line {}: {}", before.matches('\n').count() + 1, e.message()))
        })?;
        if raw.format != 1 {
            return Err(wrong(format!("a chain of format {}, this version reads format 1", raw.format)));
        }
        if raw.stage.is_empty() {
            return Err(wrong("a chain has at least one [[stage]]".to_owned()));
        }
        let layout = |said: Option<toml::Value>| said.map(StatedLayout::from_value).transpose();
        let stage = |stage: RawStage| {
            let RawStage { package, function, layout: said } = stage;
            Ok(StageFile { package, function, layout: layout(said)? })
        };
        let stages = raw.stage.into_iter().map(stage).collect::<Result<_, Error>>()?;
        Ok(ChainFile { layout: layout(raw.layout)?, stages })
    }
}

impl StatedLayout {
    fn from_value(said: toml::Value) -> Result<StatedLayout, Error> {
        match said {
            toml::Value::String(name) => Ok(StatedLayout::Named(name)),
            // Written out, it is what a file of its own would be.
            toml::Value::Table(table) => {
                Ok(StatedLayout::Written(Box::new(Layout::from_toml(&table.to_string())?)))
            }
            other => {
                let message = format!("a layout is a name or a table, not {}", other.type_str());
                Err(Error::new(ErrorKind::Layout, message))
            }
        }
    }

    /// The layout; files are in `folder`.
    pub(crate) fn read(self, folder: &Path) -> Result<Layout, Error> {
        let name = match self {
            StatedLayout::Written(layout) => return Ok(*layout),
            StatedLayout::Named(name) => name,
        };
        if presets::text(&name).is_some() {
            return Ok(presets::get(&name)?);
        }
        let path = folder.join(&name);
        let text = std::fs::read_to_string(&path).map_err(|e| {
            let message = format!("no layout is called `{name}`, and `{}`: {e}", path.display());
            Error::new(ErrorKind::Layout, message)
        })?;
        Ok(Layout::from_toml(&text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        ChainFile::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn stages_keep_their_order_and_what_they_state() {
        let text = r#"
            format = 1
            layout = "anemll"
            [[stage]]
            package = "a"
            [[stage]]
            package = "b"
            function = "f"
            layout.name = "x"
            layout.placement = "left"
            layout.inputs.tokens = "ids"
            layout.tensor = [{ name = "{key|value}", holds = "key-and-value", axes = "layer kv_head row head_dim" }]
        "#;
        let chain = ChainFile::parse(text).unwrap();
        assert!(matches!(&chain.layout, Some(StatedLayout::Named(name)) if name == "anemll"));
        let [a, b] = chain.stages.as_slice() else { panic!("{chain:?}") };
        assert!(a.package == Path::new("a") && a.function.is_none() && a.layout.is_none());
        assert!(b.package == Path::new("b") && b.function.as_deref() == Some("f"));
        let Some(StatedLayout::Written(layout)) = &b.layout else { panic!("{b:?}") };
        assert_eq!(layout.inputs.tokens.as_deref(), Some("ids"));
    }

    #[test]
    fn what_is_no_chain_is_refused_with_its_line() {
        assert!(refusal("format = 1\n\n[[stage]\n").starts_with("line 3: "));
        assert_eq!(
            refusal("format = 1\nstages = []"),
            "line 2: unknown field `stages`, expected one of \
            `format`, `layout`, `stage`"
        );
        assert!(refusal("format = 1\n[[stage]]\nfunction = \"f\"").ends_with("missing field `package`"));
        assert_eq!(refusal("format = 1"), "a chain has at least one [[stage]]");
        assert_eq!(refusal("format = 9"), "a chain of format 9, this version reads format 1");
    }

    #[test]
    fn a_layout_that_is_neither_a_name_nor_one_is_refused() {
        let with =
            |layout: &str| refusal(&format!("format = 1\nlayout = {layout}\n[[stage]]\npackage = \"a\""));
        assert!(with("3").starts_with("a layout is a name or a table"), "{}", with("3"));
        assert_eq!(with("{ name = \"x\" }"), "layout `x`: it has no tensors");
    }
}
