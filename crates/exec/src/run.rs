//! Runs a graph: node after node, blocks included.

use std::collections::HashMap;

use kvbaton_mil::program::{Function, ValueId};

use crate::error::ExecError;
use crate::graph::{Graph, Node, Work};
use crate::observe::Observed;
use crate::ops::Operand;
use crate::tensor::{Context, Tensor};

/// One run of a function.
pub(crate) struct Run<'a, 'o> {
    pub(crate) cx: &'a Context,
    pub(crate) function: &'a Function,
    /// Every value that exists now, by id.
    pub(crate) values: Vec<Option<Tensor>>,
    pub(crate) watch: &'a mut Watch<'o>,
    /// What intermediate values may take, where that was not computed at load.
    pub(crate) limit_bytes: Option<u64>,
}

/// Who looks on while a function runs.
#[derive(Default)]
pub(crate) struct Watch<'a> {
    pub(crate) observer: Option<&'a mut (dyn FnMut(Observed<'_>) + Send)>,
    /// Seconds by kind of node.
    pub(crate) seconds: Option<HashMap<String, f64>>,
}

impl Run<'_, '_> {
    /// The value of an operand; the last one to use it gets the value itself.
    pub(crate) fn operand(&mut self, operand: &Operand, last_uses: &[ValueId]) -> Tensor {
        match operand {
            Operand::Fixed(tensor) => tensor.clone(),
            Operand::Value(id) => {
                let value = &mut self.values[id.0 as usize];
                let value = if last_uses.contains(id) { value.take() } else { value.clone() };
                value.expect("the reader checked that values precede their uses")
            }
        }
    }

    /// The first operands of a node.
    fn operands(&mut self, node: &Node, number: usize) -> Vec<Tensor> {
        let operands = &node.operands;
        (0..number)
            .map(|i| {
                // Of several uses, the last one takes the value.
                let value = operands[i].value();
                let again = value.is_some() && operands[i + 1..].iter().any(|later| later.value() == value);
                let tensor = self.operand(&operands[i], if again { &[] } else { &node.last_uses });
                if node.takes_compressed(i) { tensor } else { tensor.decompressed(self.cx) }
            })
            .collect()
    }

    fn fail(&self, node: &Node, reason: String) -> ExecError {
        let output = node.outputs.first().and_then(|id| self.function.values.get(id.0 as usize));
        ExecError::Run {
            function: self.function.name.clone(),
            op: node.kind.clone(),
            output: output.map_or_else(String::new, |value| value.name.clone()),
            reason,
        }
    }

    fn check_limit(&self) -> Result<(), ExecError> {
        let Some(limit_bytes) = self.limit_bytes else { return Ok(()) };
        let needed_bytes = self.cx.pool.allocated_bytes();
        if needed_bytes <= limit_bytes {
            return Ok(());
        }
        let (function, what) = (self.function.name.clone(), "activations so far".to_owned());
        Err(ExecError::Memory { function, needed_bytes, what, limit_bytes, available: false })
    }

    /// Runs every node. What comes out is among the values.
    pub(crate) fn graph(&mut self, graph: &Graph) -> Result<(), ExecError> {
        for node in &graph.nodes {
            let start = std::time::Instant::now();
            let outputs = match &node.work {
                Work::Cond(blocks) => self.cond(node, blocks)?,
                Work::Loop { variables, test, body } => self.repeat(node, *variables, test, body)?,
                Work::Op(_) | Work::Rows(..) | Work::Attention(_) => {
                    let operands = self.operands(node, node.operands.len());
                    self.check_limit()?;
                    let outputs = node.run(self.cx, operands).and_then(|outputs| match node.detached {
                        true => outputs.into_iter().map(|t| t.into_exclusive(self.cx)).collect(),
                        false => Ok(outputs),
                    });
                    outputs.map_err(|reason| self.fail(node, reason))?
                }
            };
            for (id, tensor) in node.outputs.iter().zip(outputs) {
                // Values that the program does not name are parts of an operation.
                if let (Some(observer), Some(value)) =
                    (&mut self.watch.observer, self.function.values.get(id.0 as usize))
                {
                    let isa = self.cx.isa;
                    observer(Observed { op: &node.kind, output: &value.name, tensor: &tensor, isa });
                }
                self.values[id.0 as usize] = Some(tensor);
            }
            for id in &node.last_uses {
                self.values[id.0 as usize] = None;
            }
            if let Some(seconds) = &mut self.watch.seconds {
                let name = match &node.work {
                    // Their nodes count for themselves.
                    Work::Cond(_) | Work::Loop { .. } => continue,
                    Work::Op(_) => node.kind.clone(),
                    Work::Rows(..) => format!("rows … {}", node.kind),
                    Work::Attention(_) => "attention".to_owned(),
                };
                *seconds.entry(name).or_default() += start.elapsed().as_secs_f64();
            }
        }
        Ok(())
    }

    /// Runs a block and returns its results; nothing else of it remains.
    fn block(&mut self, block: &Graph, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, ExecError> {
        for (id, tensor) in block.inputs.iter().zip(inputs) {
            self.values[id.0 as usize] = Some(tensor);
        }
        self.graph(block)?;
        let results = block.outputs.iter().map(|o| self.operand(o, &[]).decompressed(self.cx)).collect();
        block.own().for_each(|id| self.values[id.0 as usize] = None);
        Ok(results)
    }

    fn truth(&self, node: &Node, tensor: Option<&Tensor>) -> Result<bool, ExecError> {
        let values = tensor.ok_or_else(|| "no condition".to_owned()).and_then(Tensor::bool_values);
        match values.map_err(|reason| self.fail(node, reason))?.as_slice() {
            [value] => Ok(*value),
            values => Err(self.fail(node, format!("a condition of {} values, not one", values.len()))),
        }
    }

    fn cond(&mut self, node: &Node, blocks: &[Graph; 2]) -> Result<Vec<Tensor>, ExecError> {
        let condition = self.operand(&node.operands[0], &[]);
        let block = if self.truth(node, Some(&condition))? { &blocks[0] } else { &blocks[1] };
        self.block(block, Vec::new())
    }

    fn repeat(
        &mut self,
        node: &Node,
        variables: usize,
        test: &Graph,
        body: &Graph,
    ) -> Result<Vec<Tensor>, ExecError> {
        // Blocks read what they use from outside where it is; only variables can be taken.
        let mut values = self.operands(node, variables);
        loop {
            let condition = self.block(test, values.clone())?;
            if !self.truth(node, condition.first())? {
                return Ok(values);
            }
            values = self.block(body, values)?;
        }
    }
}
