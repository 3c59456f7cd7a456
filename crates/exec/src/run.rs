//! Runs a graph: node after node, blocks included.

use std::collections::HashMap;

use kvbaton_mil::program::{Function, ValueId};

use crate::error::ExecError;
use crate::graph::{Graph, Node, Work};
use crate::ops::Operand;
use crate::tensor::{Context, Tensor};

/// One run of a function.
pub(crate) struct Run<'a> {
    pub(crate) cx: &'a Context,
    pub(crate) function: &'a Function,
    /// Every value that exists now, by id.
    pub(crate) values: Vec<Option<Tensor>>,
    /// Seconds by kind of node, for those who ask.
    pub(crate) seconds: Option<HashMap<String, f64>>,
}

impl Run<'_> {
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
                let again = operands[i + 1..].iter().any(|later| later.value() == operands[i].value());
                self.operand(&operands[i], if again { &[] } else { &node.last_uses })
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

    /// Runs every node. What comes out is among the values.
    pub(crate) fn graph(&mut self, graph: &Graph) -> Result<(), ExecError> {
        for node in &graph.nodes {
            let start = std::time::Instant::now();
            let outputs = match &node.work {
                Work::Cond(blocks) => self.cond(node, blocks)?,
                Work::Loop { variables, test, body } => self.repeat(node, *variables, test, body)?,
                Work::Op(_) | Work::Rows(..) | Work::Attention(_) => {
                    let operands = self.operands(node, node.operands.len());
                    node.run(self.cx, operands).map_err(|reason| self.fail(node, reason))?
                }
            };
            for (id, tensor) in node.outputs.iter().zip(outputs) {
                self.values[id.0 as usize] = Some(tensor);
            }
            for id in &node.last_uses {
                self.values[id.0 as usize] = None;
            }
            if let Some(seconds) = &mut self.seconds {
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
        let results = block.outputs.iter().map(|o| self.operand(o, &[])).collect();
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
