//! Packages that tests take apart and spoil, and functions that tests put together.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvbaton_memory::Bytes;
use prost::Message;

use crate::program::{Block, DataType, Dim, Function, Op, TensorType, ValueDef, ValueId, ValueType};
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

/// A function without arguments, for rules that look at names and types.
#[derive(Clone, Default)]
pub(crate) struct FunctionOf {
    values: Vec<ValueDef>,
    inputs: Vec<ValueId>,
    states: Vec<ValueId>,
    ops: Vec<Op>,
    outputs: Vec<ValueId>,
}

impl FunctionOf {
    fn define(&mut self, name: &str, ty: ValueType) -> ValueId {
        self.values.push(ValueDef { name: name.to_owned(), ty });
        ValueId(u32::try_from(self.values.len() - 1).unwrap())
    }

    pub(crate) fn input(mut self, name: &str, dtype: DataType, shape: &[usize]) -> Self {
        let id = self.define(name, ValueType::Tensor(tensor_of(dtype, shape)));
        self.inputs.push(id);
        self
    }

    pub(crate) fn state(mut self, name: &str, dtype: DataType, shape: &[usize]) -> Self {
        let id = self.define(name, ValueType::State(tensor_of(dtype, shape)));
        self.states.push(id);
        self
    }

    pub(crate) fn op(mut self, kind: &str, output: &str, dtype: DataType, shape: &[usize]) -> Self {
        let id = self.define(output, ValueType::Tensor(tensor_of(dtype, shape)));
        self.ops.push(Op {
            kind: kind.to_owned(),
            inputs: BTreeMap::new(),
            attributes: BTreeMap::new(),
            outputs: vec![id],
            blocks: Vec::new(),
        });
        self
    }

    /// The value `name` is an output.
    pub(crate) fn output(mut self, name: &str) -> Self {
        let at = self.values.iter().position(|value| value.name == name).unwrap();
        self.outputs.push(ValueId(u32::try_from(at).unwrap()));
        self
    }

    pub(crate) fn build(&self) -> Function {
        let this = self.clone();
        Function {
            name: "main".to_owned(),
            opset: "CoreML8".to_owned(),
            values: this.values,
            inputs: this.inputs,
            states: this.states,
            block: Block { inputs: Vec::new(), ops: this.ops, outputs: this.outputs },
        }
    }
}

fn tensor_of(dtype: DataType, shape: &[usize]) -> TensorType {
    TensorType { dtype, shape: shape.iter().map(|&n| Dim::Fixed(n)).collect() }
}
