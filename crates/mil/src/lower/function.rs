//! One function: single static assignment resolved, blocks and operations in order.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Weights, constants, types};
use crate::blob;
use crate::error::{MilError, Place, ProgramError};
use crate::program::{
    Argument, BlobRef, Block, Constant, ConstantData, Function, Op, ValueDef, ValueId, ValueType,
};
use crate::spec;

/// Blocks in blocks; real programs nest two or three.
const MAX_BLOCK_DEPTH: usize = 16;

/// The typed form of the function `name`.
pub(super) fn lower(
    name: &str,
    mut wire: spec::Function,
    weights: &mut Weights,
) -> Result<Function, MilError> {
    let mut function = Lowering {
        place: Place { function: name.to_owned(), ..Place::default() },
        values: Vec::new(),
        visible: HashMap::new(),
        defined_somewhere: HashSet::new(),
        weights,
    };
    let Some(body) = wire.block_specializations.remove(&wire.opset) else {
        let known = wire.block_specializations.into_keys().collect();
        return Err(function.error(ProgramError::MissingBlock { opset: wire.opset, known }));
    };
    collect_names(&body, &mut function.defined_somewhere);
    let (mut inputs, mut states) = (Vec::new(), Vec::new());
    for input in wire.inputs {
        let id = function.define(input)?;
        match function.values[id.0 as usize].ty {
            ValueType::State(_) => states.push(id),
            _ => inputs.push(id),
        }
    }
    let block = function.block(body, 0)?;
    Ok(Function { name: name.to_owned(), opset: wire.opset, values: function.values, inputs, states, block })
}

/// Every name that `block` and the blocks in it define.
fn collect_names(block: &spec::Block, names: &mut HashSet<String>) {
    names.extend(block.inputs.iter().map(|input| input.name.clone()));
    for op in &block.operations {
        names.extend(op.outputs.iter().map(|output| output.name.clone()));
        op.blocks.iter().for_each(|inner| collect_names(inner, names));
    }
}

struct Lowering<'a> {
    /// The operation at work, for errors.
    place: Place,
    values: Vec<ValueDef>,
    /// Names that the operation at work may use.
    visible: HashMap<String, ValueId>,
    /// Names that any block of the function defines, to tell a typo from a use in the wrong place.
    defined_somewhere: HashSet<String>,
    weights: &'a mut Weights,
}

impl Lowering<'_> {
    fn error(&self, problem: ProgramError) -> MilError {
        MilError::Program { place: Box::new(self.place.clone()), problem }
    }

    fn define(&mut self, wire: spec::NamedValueType) -> Result<ValueId, MilError> {
        if wire.name.is_empty() {
            return Err(self.error(ProgramError::Unnamed));
        }
        let ty = types::value_type(&wire.name, wire.r#type.as_ref()).map_err(|e| self.error(e))?;
        let id = u32::try_from(self.values.len()).expect("a model file is shorter than 4 Gi values");
        if self.visible.insert(wire.name.clone(), ValueId(id)).is_some() {
            return Err(self.error(ProgramError::DefinedTwice { name: wire.name }));
        }
        self.values.push(ValueDef { name: wire.name, ty });
        Ok(ValueId(id))
    }

    fn resolve(&self, name: &str) -> Result<ValueId, MilError> {
        if let Some(&id) = self.visible.get(name) {
            return Ok(id);
        }
        let name = name.to_owned();
        Err(self.error(if self.defined_somewhere.contains(&name) {
            ProgramError::UsedBeforeDefined { name }
        } else {
            ProgramError::Undefined { name }
        }))
    }

    /// What the block defines is visible to itself and to the blocks in it, not to what follows it.
    fn block(&mut self, wire: spec::Block, depth: usize) -> Result<Block, MilError> {
        if depth > MAX_BLOCK_DEPTH {
            return Err(self.error(ProgramError::TooDeep { limit: MAX_BLOCK_DEPTH }));
        }
        let enclosing = self.place.clone();
        let mut inputs = Vec::with_capacity(wire.inputs.len());
        for input in wire.inputs {
            inputs.push(self.define(input)?);
        }
        let mut own = inputs.clone();
        let mut ops = Vec::with_capacity(wire.operations.len());
        for op in wire.operations {
            let op = self.op(op, depth)?;
            own.extend(&op.outputs);
            ops.push(op);
        }
        self.place = enclosing;
        let outputs = wire.outputs.iter().map(|name| self.resolve(name)).collect::<Result<_, _>>()?;
        for id in own {
            self.visible.remove(&self.values[id.0 as usize].name);
        }
        Ok(Block { inputs, ops, outputs })
    }

    fn op(&mut self, wire: spec::Operation, depth: usize) -> Result<Op, MilError> {
        self.place.op.clone_from(&wire.r#type);
        self.place.output = wire.outputs.first().map(|output| output.name.clone()).unwrap_or_default();
        if wire.r#type.is_empty() {
            return Err(self.error(ProgramError::NoOperationType));
        }
        let mut inputs = BTreeMap::new();
        for (name, argument) in wire.inputs {
            let mut bound = Vec::with_capacity(argument.arguments.len());
            for binding in argument.arguments {
                bound.push(match binding.kind {
                    Some(spec::BindingKind::Name(value)) => Argument::Value(self.resolve(&value)?),
                    Some(spec::BindingKind::Value(value)) => Argument::Constant(self.constant(&name, value)?),
                    None => return Err(self.error(ProgramError::Unbound { name })),
                });
            }
            inputs.insert(name, bound);
        }
        let mut attributes = BTreeMap::new();
        for (name, value) in wire.attributes {
            let constant = self.constant(&name, value)?;
            attributes.insert(name, constant);
        }
        let place = self.place.clone();
        let mut blocks = Vec::with_capacity(wire.blocks.len());
        for inner in wire.blocks {
            blocks.push(self.block(inner, depth + 1)?);
        }
        self.place = place;
        let mut outputs = Vec::with_capacity(wire.outputs.len());
        for output in wire.outputs {
            outputs.push(self.define(output)?);
        }
        let op = Op { kind: wire.r#type, inputs, attributes, outputs, blocks };
        self.check_const(&op)?;
        Ok(op)
    }

    /// A `const` has one output and a `val` of the output's type.
    fn check_const(&self, op: &Op) -> Result<(), MilError> {
        if op.kind != "const" {
            return Ok(());
        }
        let (Some(val), [output]) = (op.attributes.get("val"), op.outputs.as_slice()) else {
            return Err(self.error(ProgramError::MissingValue { name: "val".to_owned() }));
        };
        match &self.values[output.0 as usize].ty {
            ValueType::Tensor(declared) if *declared != val.ty => {
                Err(self.error(ProgramError::ConstTypeMismatch {
                    value: val.ty.clone(),
                    declared: declared.clone(),
                }))
            }
            _ => Ok(()),
        }
    }

    fn constant(&mut self, name: &str, value: spec::Value) -> Result<Constant, MilError> {
        let (ty, unplaced) = constants::constant(name, value).map_err(|e| self.error(e))?;
        let (file, offset_bytes) = match unplaced {
            constants::Unplaced::Ready(data) => return Ok(Constant { ty, data }),
            constants::Unplaced::Blob { file, offset } => (file, offset),
        };
        let size = constants::size(name, &ty).map_err(|e| self.error(e))?;
        let located = match self.weights.file(&file)? {
            Ok(index) => blob::locate(&self.weights.files[index], offset_bytes, &ty, size.bytes, size.bits)
                .map(|data| BlobRef {
                    file: index,
                    offset_bytes: data.offset_bytes,
                    len_bytes: data.len_bytes,
                }),
            Err(problem) => Err(problem),
        };
        match located {
            Ok(blob) => Ok(Constant { ty, data: ConstantData::Blob(blob) }),
            Err(problem) => {
                Err(MilError::Blob { place: Box::new(self.place.clone()), file, offset_bytes, problem })
            }
        }
    }
}
