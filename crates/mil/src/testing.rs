//! Packages that tests take apart and spoil.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvbaton_memory::Bytes;
use prost::Message;

use crate::{MilError, Package, spec};

pub(crate) const WEIGHTS: &str = "@model_path/weights/weight.bin";

/// A package of `testdata`, decoded.
pub(crate) struct Parts {
    pub(crate) model: spec::Model,
    pub(crate) weights: Vec<u8>,
}

impl Parts {
    pub(crate) fn of(name: &str) -> Parts {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("testdata")
            .join(format!("{name}.mlpackage/Data/com.apple.CoreML"));
        let model = std::fs::read(folder.join("model.mlmodel")).unwrap();
        Parts {
            model: spec::Model::decode(model.as_slice()).unwrap(),
            weights: std::fs::read(folder.join("weights/weight.bin")).unwrap_or_default(),
        }
    }

    /// Opens what is left of the package.
    pub(crate) fn open(self) -> Result<Package, MilError> {
        let weights = BTreeMap::from([(WEIGHTS.to_owned(), Bytes::new(self.weights))]);
        Package::from_memory(&self.model.encode_to_vec(), weights)
    }

    /// The message with which the package is refused.
    pub(crate) fn refusal(self) -> String {
        self.open().expect_err("the package is broken").to_string()
    }

    pub(crate) fn program(&mut self) -> &mut spec::Program {
        self.model.ml_program.as_mut().unwrap()
    }

    pub(crate) fn function(&mut self) -> &mut spec::Function {
        self.program().functions.get_mut("main").unwrap()
    }

    pub(crate) fn block(&mut self) -> &mut spec::Block {
        self.function().block_specializations.values_mut().next().unwrap()
    }

    /// The operation that defines `output`.
    pub(crate) fn op(&mut self, output: &str) -> &mut spec::Operation {
        self.block().operations.iter_mut().find(|op| op.outputs[0].name == output).unwrap()
    }

    /// The type of the operation's output.
    pub(crate) fn tensor(&mut self, output: &str) -> &mut spec::TensorType {
        tensor(&mut self.op(output).outputs[0].r#type)
    }

    /// The value of the `const` that defines `output`.
    pub(crate) fn val(&mut self, output: &str) -> &mut spec::Value {
        self.op(output).attributes.get_mut("val").unwrap()
    }
}

pub(crate) fn tensor(ty: &mut Option<spec::ValueType>) -> &mut spec::TensorType {
    match ty.as_mut().unwrap().kind.as_mut().unwrap() {
        spec::ValueTypeKind::Tensor(tensor) => tensor,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn fixed(size: u64) -> spec::Dimension {
    let constant = spec::ConstantDimension { size };
    spec::Dimension { kind: Some(spec::DimensionKind::Constant(constant)) }
}
