//! A function, or a block of one, as nodes to run in order.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvbaton_kernels::rows::Isa;
use kvbaton_mil::program::{DataType, ValueId};

use crate::compressed::{Compressed, WeightCache};
use crate::ops::{Op, Operand};
use crate::tensor::{Context, Data, Tensor};
use crate::tile::RowProgram;

/// What a node does.
#[derive(Debug)]
pub(crate) enum Work {
    /// One operation.
    Op(Box<dyn Op>),
    /// Several operations, row by row.
    Rows(RowProgram, Vec<RowResult>),
    /// Two products and the rows between them.
    Attention(Box<crate::attention::Attention>),
    /// One of two blocks: the first one if the first operand is true.
    Cond(Box<[Graph; 2]>),
    /// A block again and again, as long as another one says so. The first operands are its variables.
    Loop { variables: usize, test: Box<Graph>, body: Box<Graph> },
}

/// A result of a row program: which one, and the tensor it becomes.
#[derive(Clone, Debug)]
pub(crate) struct RowResult {
    pub(crate) index: usize,
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<usize>,
}

/// A node: an operation, or several in one.
#[derive(Debug)]
pub(crate) struct Node {
    /// MIL's name of the operation (the last one of several).
    pub(crate) kind: String,
    pub(crate) work: Work,
    /// Those of a node with blocks end with the values that the blocks use.
    pub(crate) operands: Vec<Operand>,
    pub(crate) outputs: Vec<ValueId>,
    /// Values that no later node needs.
    pub(crate) last_uses: Vec<ValueId>,
    /// Whether its results are copied: views of a value that a later node updates in place.
    pub(crate) detached: bool,
}

/// What is known of a value at load.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) dtype: Option<DataType>,
    pub(crate) shape: Option<Vec<usize>>,
}

/// A function or a block, ready to run.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    /// Values given from outside: inputs and states of a function, inputs of a block.
    pub(crate) inputs: Vec<ValueId>,
    /// What it returns, in its order.
    pub(crate) outputs: Vec<Operand>,
    /// Each state of a function: the value it starts as, and what it is left as.
    pub(crate) states: Vec<(ValueId, Operand)>,
    /// Every value, by id: those of the program, then those made by the builder.
    pub(crate) values: Arc<Vec<Known>>,
}

impl Node {
    pub(crate) fn new(kind: &str, work: Work, operands: Vec<Operand>, outputs: Vec<ValueId>) -> Node {
        Node { kind: kind.to_owned(), work, operands, outputs, last_uses: Vec::new(), detached: false }
    }

    /// The values it reads.
    pub(crate) fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.operands.iter().filter_map(Operand::value)
    }

    /// Whether operand `index` may be a weight that is still compressed.
    pub(crate) fn takes_compressed(&self, index: usize) -> bool {
        matches!(&self.work, Work::Op(op) if op.takes_compressed(index))
    }

    /// Computes its outputs; not for nodes with blocks.
    pub(crate) fn run(&self, cx: &Context, operands: Vec<Tensor>) -> Result<Vec<Tensor>, String> {
        match &self.work {
            Work::Op(op) => op.eval_owned(cx, operands),
            Work::Rows(program, results) => {
                let values = program.run(cx, &operands)?.into_iter();
                let values: Vec<_> = values.map(|r| Data::Float(Arc::new(r))).collect();
                let tensor = |r: &RowResult| Tensor::new(r.dtype, r.shape.clone(), values[r.index].clone());
                Ok(results.iter().map(tensor).collect())
            }
            Work::Attention(attention) => attention.run(cx, &operands),
            Work::Cond(_) | Work::Loop { .. } => Err("a node with blocks".to_owned()),
        }
    }

    /// Its blocks.
    pub(crate) fn blocks(&self) -> Vec<&Graph> {
        match &self.work {
            Work::Cond(blocks) => blocks.iter().collect(),
            Work::Loop { test, body, .. } => vec![test, body],
            Work::Op(_) | Work::Rows(..) | Work::Attention(_) => Vec::new(),
        }
    }
}

impl Graph {
    /// The shape of a value, where it is known at load.
    pub(crate) fn known_shape(&self, id: ValueId) -> Option<&[usize]> {
        self.values[id.0 as usize].shape.as_deref()
    }

    /// Values that the run itself needs: outputs and the last versions of states.
    pub(crate) fn kept(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.outputs.iter().chain(self.states.iter().map(|(_, last)| last)).filter_map(Operand::value)
    }

    /// Values that exist only while the graph runs.
    pub(crate) fn own(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().chain(self.nodes.iter().flat_map(|n| &n.outputs)).copied()
    }

    /// Values from outside that a block uses.
    pub(crate) fn captured(&self) -> Vec<ValueId> {
        let own: HashSet<ValueId> = self.own().collect();
        let mut captured = Vec::new();
        for id in self.nodes.iter().flat_map(Node::reads).chain(self.kept()) {
            if !own.contains(&id) && !captured.contains(&id) {
                captured.push(id);
            }
        }
        captured
    }

    /// Shapes of a node's operands, if all are known.
    pub(crate) fn operand_shapes<'a>(&'a self, operands: &'a [Operand]) -> Option<Vec<&'a [usize]>> {
        operands
            .iter()
            .map(|o| match o {
                Operand::Value(id) => self.known_shape(*id),
                Operand::Fixed(t) => Some(t.shape.as_slice()),
            })
            .collect()
    }

    /// Decompresses every weight, to be kept, with the threads of the current rayon pool.
    pub(crate) fn keep_weights(&mut self, isa: Isa, cache: &WeightCache) {
        let mut kept: HashMap<*const Compressed, Data> = HashMap::new();
        for weight in crate::footprint::compressed_weights(self) {
            kept.insert(Arc::as_ptr(weight), weight.kept(isa, cache));
        }
        self.replace(&kept);
    }

    /// Puts what is kept in the place of compressed weights.
    fn replace(&mut self, kept: &HashMap<*const Compressed, Data>) {
        let operands = self.nodes.iter_mut().flat_map(|n| &mut n.operands).chain(&mut self.outputs);
        for operand in operands {
            if let Operand::Fixed(tensor) = operand
                && let Data::Compressed(weight) = &tensor.data
                && let Some(data) = kept.get(&Arc::as_ptr(weight))
            {
                tensor.data = data.clone();
            }
        }
        for node in &mut self.nodes {
            match &mut node.work {
                Work::Cond(blocks) => blocks.iter_mut().for_each(|b| b.replace(kept)),
                Work::Loop { test, body, .. } => {
                    test.replace(kept);
                    body.replace(kept);
                }
                Work::Op(_) | Work::Rows(..) | Work::Attention(_) => {}
            }
        }
    }

    /// Notes after which node each value can be freed. What a block uses from outside is not its to free.
    pub(crate) fn plan_frees(&mut self) {
        let own: HashSet<ValueId> = self.own().collect();
        let mut last: HashMap<ValueId, usize> = HashMap::new();
        for (i, node) in self.nodes.iter().enumerate() {
            // A value that nobody reads goes right away.
            for id in node.outputs.iter().copied().chain(node.reads()).filter(|id| own.contains(id)) {
                last.insert(id, i);
            }
        }
        for id in self.kept() {
            last.remove(&id);
        }
        for node in &mut self.nodes {
            node.last_uses.clear();
            match &mut node.work {
                Work::Cond(blocks) => blocks.iter_mut().for_each(Graph::plan_frees),
                Work::Loop { test, body, .. } => {
                    test.plan_frees();
                    body.plan_frees();
                }
                Work::Op(_) | Work::Rows(..) | Work::Attention(_) => {}
            }
        }
        for (id, i) in &last {
            self.nodes[*i].last_uses.push(*id);
        }
        self.plan_copies(&last);
    }

    /// Lets updates of values that nobody else needs happen in place: views of such a value that outlive the update
    /// are copied when they are taken, which costs less than the whole. `last`: where values are used last, those
    /// that are kept left out.
    fn plan_copies(&mut self, last: &HashMap<ValueId, usize>) {
        let updates: Vec<(usize, ValueId)> = (0..self.nodes.len())
            .filter_map(|i| match &self.nodes[i].work {
                Work::Op(op) if op.updates() => Some((i, self.nodes[i].operands.first()?.value()?)),
                _ => None,
            })
            .filter(|(i, id)| last.get(id) == Some(i))
            .collect();
        for (at, updated) in updates {
            let mut views = HashSet::from([updated]);
            for node in &mut self.nodes[..at] {
                let Work::Op(op) = &node.work else { continue };
                let reads = node.operands.iter().filter_map(Operand::value).any(|id| views.contains(&id));
                if !reads || !op.views() {
                    continue;
                }
                if node.outputs.iter().any(|id| last.get(id).is_none_or(|end| *end > at)) {
                    node.detached = true;
                } else if !node.detached {
                    views.extend(&node.outputs);
                }
            }
        }
    }
}
