//! What a compiled model (`.mlmodelc`) says of itself.
//!
//! A compiled model has no protobuf any more; beside it lies `metadata.json`, which Core ML's compiler writes: names,
//! shapes and types of inputs, outputs and states, by function where there are several, and the author's metadata.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::{Element, RuntimeError};

/// A compiled model's description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompiledModel {
    /// Its functions; the one without a name where it has only one.
    pub functions: Vec<CompiledFunction>,
    /// What its author wrote beside it.
    pub metadata: BTreeMap<String, String>,
}

/// A function of a compiled model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompiledFunction {
    /// Its name; `None` of the only function of a model that names none.
    pub name: Option<String>,
    /// Its inputs.
    pub inputs: Vec<CompiledFeature>,
    /// Its outputs.
    pub outputs: Vec<CompiledFeature>,
    /// Its states.
    pub states: Vec<CompiledFeature>,
}

/// An array that goes in, comes out, or stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompiledFeature {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub element: Element,
    /// Its shape; of a flexible one the default.
    pub shape: Vec<usize>,
}

/// Whether `path` is a compiled model rather than a package.
pub fn is_compiled(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "mlmodelc") || path.join("coremldata.bin").is_file()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    functions: Vec<Schema>,
    #[serde(default)]
    user_defined_metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    only: Schema,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Schema {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    input_schema: Vec<Feature>,
    #[serde(default)]
    output_schema: Vec<Feature>,
    #[serde(default)]
    state_schema: Vec<Feature>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Feature {
    name: String,
    #[serde(default)]
    data_type: String,
    #[serde(default)]
    shape: String,
}

impl CompiledModel {
    /// Reads the description of the compiled model in the folder `path`.
    ///
    /// # Errors
    ///
    /// When it has no `metadata.json`, or that is not of the form that the compiler writes.
    pub fn read(path: &Path) -> Result<CompiledModel, RuntimeError> {
        let file = path.join("metadata.json");
        let text = std::fs::read(&file)
            .map_err(|e| unreadable(path, format!("metadata.json cannot be read: {e}")))?;
        CompiledModel::parse(path, &text)
    }

    fn parse(path: &Path, text: &[u8]) -> Result<CompiledModel, RuntimeError> {
        let mut documents: Vec<Document> =
            serde_json::from_slice(text).map_err(|e| unreadable(path, format!("metadata.json: {e}")))?;
        let document = match (documents.pop(), documents.len()) {
            (Some(document), 0) => document,
            (_, others) => {
                let count = if others == 0 { 0 } else { others + 1 };
                return Err(unreadable(path, format!("metadata.json describes {count} models")));
            }
        };
        let mut schemas = document.functions;
        if schemas.is_empty() {
            schemas.push(Schema { name: None, ..document.only });
        }
        let functions =
            schemas.into_iter().map(|schema| function(path, schema)).collect::<Result<Vec<_>, _>>()?;
        Ok(CompiledModel { functions, metadata: document.user_defined_metadata })
    }
}

fn function(path: &Path, schema: Schema) -> Result<CompiledFunction, RuntimeError> {
    let features = |all: Vec<Feature>| all.into_iter().map(|f| feature(path, f)).collect::<Result<_, _>>();
    Ok(CompiledFunction {
        name: schema.name,
        inputs: features(schema.input_schema)?,
        outputs: features(schema.output_schema)?,
        states: features(schema.state_schema)?,
    })
}

fn feature(path: &Path, feature: Feature) -> Result<CompiledFeature, RuntimeError> {
    let Feature { name, data_type, shape } = feature;
    let element = match data_type.as_str() {
        "Float16" => Element::Float16,
        "Float32" => Element::Float32,
        "Int32" => Element::Int32,
        "Int8" => Element::Int8,
        other => return Err(unreadable(path, format!("`{name}` has elements of type `{other}`"))),
    };
    // The shape is a list inside a string.
    let shape = serde_json::from_str(&shape)
        .map_err(|e| unreadable(path, format!("`{name}` has the shape `{shape}`: {e}")))?;
    Ok(CompiledFeature { name, element, shape })
}

fn unreadable(path: &Path, message: String) -> RuntimeError {
    RuntimeError::Compiled { path: path.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"[{
      "metadataOutputVersion": "3.0", "storagePrecision": "Float16", "specificationVersion": 9,
      "outputSchema": [{"hasShapeFlexibility": "0", "isOptional": "0", "dataType": "Float16",
        "formattedType": "MultiArray (Float16 2 × 2 × 8 × 4)", "shortDescription": "", "shape": "[2, 2, 8, 4]",
        "name": "key_cache", "type": "MultiArray"}],
      "availability": {"macOS": "15.0"}, "modelType": {"name": "MLModelType_mlProgram"},
      "userDefinedMetadata": {"com.github.apple.coremltools.version": "9.0"},
      "inputSchema": [{"dataType": "Int32", "shape": "[1, 8]", "name": "input_ids", "type": "MultiArray"}],
      "stateSchema": [], "generatedClassName": "prefill", "method": "predict"
    }]"#;

    const SEVERAL: &str = r#"[{
      "userDefinedMetadata": {}, "inputSchema": [], "defaultFunctionName": "prefill_128",
      "functions": [
        {"name": "prefill_128", "inputSchema": [{"dataType": "Int32", "shape": "[1, 128]", "name": "input_ids"}],
         "outputSchema": [], "stateSchema": []},
        {"name": "decode", "inputSchema": [], "outputSchema": [],
         "stateSchema": [{"dataType": "Float16", "shape": "[30, 3, 512, 64]", "name": "key_cache"}]}
      ]
    }]"#;

    fn parse(text: &str) -> Result<CompiledModel, String> {
        CompiledModel::parse(Path::new("m.mlmodelc"), text.as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_model_of_one_function_is_described() {
        let model = parse(ONE).unwrap();
        assert_eq!(model.metadata["com.github.apple.coremltools.version"], "9.0");
        let [function] = &model.functions[..] else { panic!("{model:?}") };
        assert_eq!(function.name, None);
        let shape = vec![2, 2, 8, 4];
        let element = Element::Float16;
        assert_eq!(function.outputs, [CompiledFeature { name: "key_cache".to_owned(), element, shape }]);
        assert_eq!(function.inputs[0].element, Element::Int32);
    }

    #[test]
    fn functions_are_told_apart() {
        let model = parse(SEVERAL).unwrap();
        let names: Vec<_> = model.functions.iter().map(|f| f.name.as_deref()).collect();
        assert_eq!(names, [Some("prefill_128"), Some("decode")]);
        assert_eq!(model.functions[1].states[0].shape, [30, 3, 512, 64]);
    }

    #[test]
    fn what_the_compiler_does_not_write_is_refused() {
        for (text, why) in [
            ("", "metadata.json"),
            ("{}", "metadata.json"),
            ("[]", "describes 0 models"),
            (&format!("[{0}, {0}]", ONE.trim().trim_matches(['[', ']'])), "describes 2 models"),
            (&ONE.replace("Int32", "String"), "`input_ids` has elements of type `String`"),
            (&ONE.replace("[1, 8]", "1 x 8"), "`input_ids` has the shape `1 x 8`"),
            (&ONE.replace("[1, 8]", "[1, -8]"), "`input_ids` has the shape `[1, -8]`"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why) && error.contains("m.mlmodelc"), "{error}");
        }
        let missing = CompiledModel::read(Path::new("/nowhere/m.mlmodelc")).unwrap_err().to_string();
        assert!(missing.contains("metadata.json cannot be read"), "{missing}");
    }
}
