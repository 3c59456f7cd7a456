//! Builds the graph of a function: operations checked, states made values, blocks nested.

use std::collections::HashMap;
use std::sync::Arc;

use kvbaton_mil::Package;
use kvbaton_mil::program::{Argument, Block, Constant, DataType, Function, Op as MilOp, ValueId, ValueType};

use crate::error::ExecError;
use crate::graph::{Graph, Known, Node, Work};
use crate::ops::{self, Form, Op, Operand, Part, Reason, attention, states};
use crate::tensor::Tensor;

/// The graph of `function`.
///
/// # Errors
///
/// When an operation is missing or used in a form that is not handled, or shapes contradict the program's.
pub(crate) fn build(package: &Arc<Package>, function: &Function) -> Result<Graph, ExecError> {
    let mut constants: HashMap<ValueId, &Constant> = HashMap::new();
    for op in function.all_ops().into_iter().filter(|op| op.kind == "const") {
        if let (Some(val), Some(id)) =
            (op.attributes.get("val").or_else(|| inline_val(op)), op.outputs.first())
        {
            constants.insert(*id, val);
        }
    }
    let known = |ty: &ValueType| match ty {
        ValueType::Tensor(ty) | ValueType::State(ty) => {
            Known { dtype: Some(ty.dtype), shape: ty.fixed_shape() }
        }
        ValueType::List(_) | ValueType::Tuple(_) | ValueType::Dictionary(..) => {
            Known { dtype: None, shape: None }
        }
    };
    let mut builder = Builder {
        package,
        function,
        constants,
        decompressed: HashMap::new(),
        aliases: HashMap::new(),
        versions: function.states.iter().map(|id| (*id, Operand::Value(*id))).collect(),
        values: function.values.iter().map(|v| known(&v.ty)).collect(),
    };
    let mut graph = builder.block(&function.block, &[])?;
    graph.inputs = [&function.inputs[..], &function.states].concat();
    graph.states = function.states.iter().map(|id| (*id, builder.versions[id].clone())).collect();
    share(&mut graph, &Arc::new(builder.values));
    Ok(graph)
}

/// Tells every block what is known of all values.
fn share(graph: &mut Graph, values: &Arc<Vec<Known>>) {
    graph.values = Arc::clone(values);
    for node in &mut graph.nodes {
        match &mut node.work {
            Work::Cond(blocks) => blocks.iter_mut().for_each(|b| share(b, values)),
            Work::Loop { test, body, .. } => [test, body].into_iter().for_each(|b| share(b, values)),
            Work::Op(_) | Work::Rows(..) | Work::Attention(_) => {}
        }
    }
}

/// States are values: `read_state` names the version that is current, `write_state` makes another one current. So the
/// operations are pure, and an update whose operand nobody else needs happens in place.
struct Builder<'a> {
    package: &'a Arc<Package>,
    function: &'a Function,
    /// Values that `const` operations define, in any block.
    constants: HashMap<ValueId, &'a Constant>,
    /// Results of decompressions.
    decompressed: HashMap<ValueId, Part>,
    /// What the results of `read_state` stand for.
    aliases: HashMap<ValueId, Operand>,
    /// The current version of each state.
    versions: HashMap<ValueId, Operand>,
    values: Vec<Known>,
}

impl<'a> Builder<'a> {
    /// A value that the program does not name.
    fn fresh(&mut self, dtype: Option<DataType>, shape: Option<Vec<usize>>) -> ValueId {
        self.values.push(Known { dtype, shape });
        ValueId(u32::try_from(self.values.len() - 1).expect("a program has fewer than 4 Gi values"))
    }

    fn form<'f>(&'f self, op: &'f MilOp) -> Form<'f> {
        Form {
            package: self.package,
            function: self.function,
            op,
            constants: &self.constants,
            decompressed: &self.decompressed,
            aliases: &self.aliases,
            operands: Vec::new(),
        }
    }

    /// What a value stands for.
    fn resolve(&self, id: ValueId) -> Operand {
        let constant = || self.constants.get(&id).and_then(|c| Tensor::constant(self.package, c));
        let weight = || match self.decompressed.get(&id) {
            Some(Part::Weight(tensor)) => Some(tensor.clone()),
            _ => None,
        };
        let fixed = weight().or_else(constant).map(Operand::Fixed);
        fixed.or_else(|| self.aliases.get(&id).cloned()).unwrap_or(Operand::Value(id))
    }

    /// The graph of a block. `written`: states whose versions are further results.
    fn block(&mut self, block: &'a Block, written: &[ValueId]) -> Result<Graph, ExecError> {
        let mut graph = Graph { inputs: block.inputs.clone(), ..Graph::default() };
        for op in block.ops.iter().filter(|op| op.kind != "const") {
            let fail = |reason| {
                let (function, op, output) = place(self.function, op);
                ExecError::Form { function, op, output, reason }
            };
            if matches!(op.kind.as_str(), "cond" | "while_loop") {
                graph.nodes.push(self.control(op)?);
                continue;
            }
            let mut form = self.form(op);
            if let Some(parts) = ops::decompress(&form) {
                let parts = parts.map_err(fail)?;
                self.decompressed.extend(parts);
                continue;
            }
            if states::NAMES.contains(&op.kind.as_str()) {
                match states::name(&mut form, &self.versions).map_err(fail)? {
                    states::Named::Read { result, version } => self.aliases.insert(result, version),
                    states::Named::Written { state, version } => self.versions.insert(state, version),
                };
                continue;
            }
            if op.kind == attention::NAME {
                let plan = attention::plan(&mut form).map_err(fail)?;
                let mut fresh = |dtype, shape| self.fresh(Some(dtype), shape);
                graph.nodes.extend(plan.nodes(&op.outputs, &mut fresh));
                continue;
            }
            let Some(builder) = ops::builder(&op.kind) else {
                let (function, op, output) = place(self.function, op);
                return Err(ExecError::UnsupportedOp { function, op, output });
            };
            let built = builder(&mut form).map_err(fail)?;
            self.check(op, built.as_ref(), &form.operands).map_err(fail)?;
            let operands = form.operands;
            graph.nodes.push(Node::new(&op.kind, Work::Op(built), operands, op.outputs.clone()));
        }
        graph.outputs = block.outputs.iter().map(|id| self.resolve(*id)).collect();
        graph.outputs.extend(written.iter().map(|state| self.versions[state].clone()));
        Ok(graph)
    }

    /// `cond` or `while_loop`. States that its blocks write become results of the node, and variables of the loop.
    fn control(&mut self, op: &'a MilOp) -> Result<Node, ExecError> {
        let fail = |reason: Reason| {
            let (function, op, output) = place(self.function, op);
            ExecError::Form { function, op, output, reason }
        };
        let [first, second] = op.blocks.as_slice() else {
            return Err(fail(format!("{} blocks, not two", op.blocks.len())));
        };
        let mut form = self.form(op);
        let is_loop = op.kind == "while_loop";
        let operands = if is_loop {
            let variables = form.operand_list("loop_vars").map_err(fail)?;
            let results = [first.inputs.len(), second.inputs.len(), second.outputs.len(), op.outputs.len()];
            if results != [variables; 4] || first.outputs.len() != 1 {
                let [test, body, results, _] = results;
                return Err(fail(format!(
                    "{variables} variables; its blocks take {test} and {body} and give {results}"
                )));
            }
            form.operands
        } else {
            form.operand("pred").map_err(fail)?;
            let results = [first.outputs.len(), second.outputs.len()];
            if results != [op.outputs.len(); 2] {
                return Err(fail(format!("blocks of {results:?} results for {}", op.outputs.len())));
            }
            form.operands
        };
        let mut written = Vec::new();
        self.written(first, &mut written);
        if is_loop && !written.is_empty() {
            return Err(fail("its condition writes a state".to_owned()));
        }
        self.written(second, &mut written);

        let mut operands = operands;
        let variables = operands.len() + written.len();
        let before = self.versions.clone();
        let work = if is_loop {
            operands.extend(written.iter().map(|state| before[state].clone()));
            let mut block = |inner: &'a Block, written: &[ValueId], all: &[ValueId]| {
                let inputs: Vec<ValueId> = all.iter().map(|state| self.version(*state)).collect();
                let mut graph = self.block(inner, written)?;
                graph.inputs.extend(inputs);
                Ok::<_, ExecError>(graph)
            };
            let test = block(first, &[], &written)?;
            let body = block(second, &written, &written)?;
            Work::Loop { variables, test: Box::new(test), body: Box::new(body) }
        } else {
            let yes = self.block(first, &written)?;
            self.versions.clone_from(&before);
            let no = self.block(second, &written)?;
            Work::Cond(Box::new([yes, no]))
        };
        self.versions = before;
        let mut outputs = op.outputs.clone();
        outputs.extend(written.iter().map(|state| self.version(*state)));
        let mut node = Node::new(&op.kind, work, operands, outputs);
        let captured: Vec<ValueId> = node.blocks().into_iter().flat_map(Graph::captured).collect();
        node.operands.extend(captured.into_iter().map(Operand::Value));
        Ok(node)
    }

    /// Makes a new value the current version of a state.
    fn version(&mut self, state: ValueId) -> ValueId {
        let Known { dtype, shape } = self.values[state.0 as usize].clone();
        let id = self.fresh(dtype, shape);
        self.versions.insert(state, Operand::Value(id));
        id
    }

    /// Adds the states that a block writes, or a block in it.
    fn written(&self, block: &Block, states: &mut Vec<ValueId>) {
        for op in &block.ops {
            op.blocks.iter().for_each(|inner| self.written(inner, states));
            let input = op.inputs.get("input").and_then(|a| a.first());
            if let ("write_state", Some(Argument::Value(id))) = (op.kind.as_str(), input)
                && self.versions.contains_key(id)
                && !states.contains(id)
            {
                states.push(*id);
            }
        }
    }

    /// Compares the shapes an operation gives with those the program declares.
    fn check(&self, op: &MilOp, built: &dyn Op, operands: &[Operand]) -> Result<(), Reason> {
        let shapes = operands.iter().map(|o| match o {
            Operand::Value(id) => self.values[id.0 as usize].shape.as_deref(),
            Operand::Fixed(t) => Some(t.shape.as_slice()),
        });
        let Some(shapes) = shapes.collect::<Option<Vec<_>>>() else { return Ok(()) };
        let Some(inferred) = built.infer(&shapes)? else { return Ok(()) };
        if inferred.len() != op.outputs.len() {
            return Err(format!("{} results, the program declares {}", inferred.len(), op.outputs.len()));
        }
        for (shape, id) in inferred.iter().zip(&op.outputs) {
            if let Some(declared) = self.values[id.0 as usize].shape.as_ref().filter(|d| *d != shape) {
                let name = &self.function.value(*id).name;
                return Err(format!("`{name}` is declared {declared:?} and comes out as {shape:?}"));
            }
        }
        Ok(())
    }
}

fn place(function: &Function, op: &MilOp) -> (String, String, String) {
    let output = op.outputs.first().map_or_else(String::new, |id| function.value(*id).name.clone());
    (function.name.clone(), op.kind.clone(), output)
}

/// Some writers keep a constant's value among the inputs.
fn inline_val(op: &MilOp) -> Option<&Constant> {
    match op.inputs.get("val").and_then(|a| a.first()) {
        Some(Argument::Constant(c)) => Some(c),
        _ => None,
    }
}
