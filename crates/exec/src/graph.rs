//! A function as nodes to run in order: built from the program, checked, then fused.

use std::collections::HashMap;
use std::sync::Arc;

use kvbaton_kernels::rows::Isa;
use kvbaton_mil::Package;
use kvbaton_mil::program::{Constant, Function, ValueId, ValueType};

use crate::compressed::{Compressed, WeightCache};
use crate::error::ExecError;
use crate::ops::{self, Form, Op, Operand, Part, states};
use crate::tensor::{Context, Data, Tensor};
use crate::tile::RowProgram;

/// What a node does.
#[derive(Debug)]
pub(crate) enum Work {
    /// One operation.
    Op(Box<dyn Op>),
    /// Several operations, row by row; for each output, which of the program's results it is.
    Rows(RowProgram, Vec<usize>),
    /// Two products and the rows between them.
    Attention(Box<crate::attention::Attention>),
}

/// A node: an operation, or several in one.
#[derive(Debug)]
pub(crate) struct Node {
    /// MIL's name of the operation (the last one of several).
    pub(crate) kind: String,
    pub(crate) work: Work,
    pub(crate) operands: Vec<Operand>,
    pub(crate) outputs: Vec<ValueId>,
    /// Values that no later node needs.
    pub(crate) last_uses: Vec<ValueId>,
}

/// A function, ready to run.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    /// Shapes of values, where they are known at load.
    pub(crate) shapes: Vec<Option<Vec<usize>>>,
    /// What the function returns, in its order.
    pub(crate) outputs: Vec<Operand>,
    /// Each state: the value it starts as, and what it is left as.
    pub(crate) states: Vec<(ValueId, Operand)>,
}

impl Node {
    /// The values it reads.
    pub(crate) fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.operands.iter().filter_map(Operand::value)
    }

    /// Whether operand `index` may be a weight that is still compressed.
    pub(crate) fn takes_compressed(&self, index: usize) -> bool {
        matches!(&self.work, Work::Op(op) if op.takes_compressed(index))
    }

    /// Computes its outputs.
    pub(crate) fn run(
        &self,
        cx: &Context,
        function: &Function,
        operands: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, String> {
        match &self.work {
            Work::Op(op) => op.eval_owned(cx, operands),
            Work::Rows(program, which) => {
                let results: Vec<_> =
                    program.run(cx, &operands)?.into_iter().map(|r| Data::Float(Arc::new(r))).collect();
                self.outputs
                    .iter()
                    .zip(which)
                    .map(|(id, i)| match &function.value(*id).ty {
                        ValueType::Tensor(ty) => {
                            let shape = ty.fixed_shape().ok_or("a shape that was known at load is not")?;
                            Ok(Tensor::new(ty.dtype, shape, results[*i].clone()))
                        }
                        _ => Err("a result is no tensor".to_owned()),
                    })
                    .collect()
            }
            Work::Attention(attention) => attention.run(cx, &operands),
        }
    }
}

/// States as values: `read_state` names the version that is current, `write_state` makes another one current. So the
/// operations are pure, and an update whose operand nobody else needs happens in place.
struct Names {
    /// What the results of `read_state` stand for.
    aliases: HashMap<ValueId, Operand>,
    /// The current version of each state.
    versions: HashMap<ValueId, Operand>,
}

impl Names {
    fn of(function: &Function) -> Names {
        Names {
            aliases: HashMap::new(),
            versions: function.states.iter().map(|id| (*id, Operand::Value(*id))).collect(),
        }
    }

    fn take(&mut self, named: states::Named) {
        match named {
            states::Named::Read { result, version } => self.aliases.insert(result, version),
            states::Named::Written { state, version } => self.versions.insert(state, version),
        };
    }
}

fn place(function: &Function, op: &kvbaton_mil::program::Op) -> (String, String, String) {
    let output = op.outputs.first().map_or_else(String::new, |id| function.value(*id).name.clone());
    (function.name.clone(), op.kind.clone(), output)
}

impl Graph {
    /// Builds every operation of `function`.
    ///
    /// # Errors
    ///
    /// When an operation is missing or used in a form that is not handled, or shapes contradict the program's.
    pub(crate) fn build(package: &Arc<Package>, function: &Function) -> Result<Graph, ExecError> {
        let mut constants: HashMap<ValueId, &Constant> = HashMap::new();
        for op in function.block.ops.iter().filter(|op| op.kind == "const") {
            if let (Some(val), Some(id)) =
                (op.attributes.get("val").or_else(|| inline_val(op)), op.outputs.first())
            {
                constants.insert(*id, val);
            }
        }
        let mut graph = Graph {
            nodes: Vec::new(),
            shapes: function
                .values
                .iter()
                .map(|v| match &v.ty {
                    ValueType::Tensor(ty) | ValueType::State(ty) => ty.fixed_shape(),
                    _ => None,
                })
                .collect(),
            outputs: Vec::new(),
            states: Vec::new(),
        };
        let mut names = Names::of(function);
        let mut decompressed: HashMap<ValueId, Part> = HashMap::new();
        for op in function.block.ops.iter().filter(|op| op.kind != "const") {
            let (name, kind, output) = place(function, op);
            let mut form = Form {
                package,
                function,
                op,
                constants: &constants,
                decompressed: &decompressed,
                aliases: &names.aliases,
                operands: Vec::new(),
            };
            if matches!(op.kind.as_str(), "read_state" | "write_state") {
                let named = states::name(&mut form, &names.versions);
                names.take(named.map_err(|reason| ExecError::Form {
                    function: name,
                    op: kind,
                    output,
                    reason,
                })?);
                continue;
            }
            if let Some(parts) = ops::decompress(&form) {
                let parts =
                    parts.map_err(|reason| ExecError::Form { function: name, op: kind, output, reason })?;
                decompressed.extend(parts);
                continue;
            }
            let Some(builder) = ops::builder(&op.kind) else {
                return Err(ExecError::UnsupportedOp { function: name, op: kind, output });
            };
            let built = builder(&mut form).and_then(|built| {
                graph.check(function, op, built.as_ref(), &form.operands)?;
                Ok(built)
            });
            let work = match built {
                Ok(built) => Work::Op(built),
                Err(reason) => return Err(ExecError::Form { function: name, op: kind, output, reason }),
            };
            let outputs = op.outputs.clone();
            graph.nodes.push(Node { kind, work, operands: form.operands, outputs, last_uses: Vec::new() });
        }
        graph.outputs = function
            .block
            .outputs
            .iter()
            .map(|id| {
                let constant = || constants.get(id).and_then(|c| Tensor::constant(package, c));
                let weight = || match decompressed.get(id) {
                    Some(Part::Weight(tensor)) => Some(tensor.clone()),
                    _ => None,
                };
                let fixed = weight().or_else(constant).map(Operand::Fixed);
                fixed.or_else(|| names.aliases.get(id).cloned()).unwrap_or(Operand::Value(*id))
            })
            .collect();
        graph.states = function.states.iter().map(|id| (*id, names.versions[id].clone())).collect();
        Ok(graph)
    }

    /// Values that the run itself needs: outputs and the last versions of states.
    pub(crate) fn kept(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.outputs.iter().chain(self.states.iter().map(|(_, last)| last)).filter_map(Operand::value)
    }

    /// Shapes of a node's operands, if all are known.
    pub(crate) fn operand_shapes<'a>(&'a self, operands: &'a [Operand]) -> Option<Vec<&'a [usize]>> {
        operands
            .iter()
            .map(|o| match o {
                Operand::Value(id) => self.shapes[id.0 as usize].as_deref(),
                Operand::Fixed(t) => Some(t.shape.as_slice()),
            })
            .collect()
    }

    /// Compares the shapes an operation gives with those the program declares.
    fn check(
        &self,
        function: &Function,
        op: &kvbaton_mil::program::Op,
        built: &dyn Op,
        operands: &[Operand],
    ) -> Result<(), String> {
        let Some(shapes) = self.operand_shapes(operands) else { return Ok(()) };
        let Some(inferred) = built.infer(&shapes)? else { return Ok(()) };
        if inferred.len() != op.outputs.len() {
            return Err(format!("{} results, the program declares {}", inferred.len(), op.outputs.len()));
        }
        for (shape, id) in inferred.iter().zip(&op.outputs) {
            if let Some(declared) = self.shapes[id.0 as usize].as_ref().filter(|d| *d != shape) {
                let name = &function.value(*id).name;
                return Err(format!("`{name}` is declared {declared:?} and comes out as {shape:?}"));
            }
        }
        Ok(())
    }

    /// Decompresses every weight, to be kept, with the threads of the current rayon pool.
    pub(crate) fn keep_weights(&mut self, isa: Isa, cache: &WeightCache) {
        let mut kept: HashMap<*const Compressed, Data> = HashMap::new();
        for weight in crate::footprint::compressed_weights(self) {
            kept.insert(Arc::as_ptr(weight), weight.kept(isa, cache));
        }
        let operands = self.nodes.iter_mut().flat_map(|n| &mut n.operands).chain(&mut self.outputs);
        for operand in operands {
            if let Operand::Fixed(tensor) = operand
                && let Data::Compressed(weight) = &tensor.data
                && let Some(data) = kept.get(&Arc::as_ptr(weight))
            {
                tensor.data = data.clone();
            }
        }
    }

    /// Notes after which node each value can be freed.
    pub(crate) fn plan_frees(&mut self) {
        let mut last: HashMap<ValueId, usize> = HashMap::new();
        for (i, node) in self.nodes.iter().enumerate() {
            // A value that nobody reads goes right away.
            for id in node.outputs.iter().copied().chain(node.reads()) {
                last.insert(id, i);
            }
        }
        for id in self.kept() {
            last.remove(&id);
        }
        for node in &mut self.nodes {
            node.last_uses.clear();
        }
        for (id, i) in last {
            self.nodes[i].last_uses.push(id);
        }
    }
}

/// Some writers keep a constant's value among the inputs.
fn inline_val(op: &kvbaton_mil::program::Op) -> Option<&Constant> {
    match op.inputs.get("val").and_then(|a| a.first()) {
        Some(kvbaton_mil::program::Argument::Constant(c)) => Some(c),
        _ => None,
    }
}
