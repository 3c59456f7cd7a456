//! What a function will take of memory, computed from its graph before anything is allocated.
//!
//! The run is followed node by node with sizes alone: buffers come from a pool that keeps every size it once gave
//! out, values are views of others where the operation is one, and operands that an operation may have to pack are
//! counted as copies. Of a `cond` both blocks are followed, a loop as often as its variables need to change places. The
//! result is a bound, not an estimate: what a run allocates, the first or a later one, stays below it.
//!
//! `buffers` has the pool, `blocks` follows operations that have blocks.

use std::collections::HashSet;
use std::sync::Arc;

use kvbaton_mil::program::{Argument, ConstantData, DataType, Function, ValueId, ValueType};

use crate::compressed::Compressed;
use crate::error::ExecError;
use crate::graph::{Graph, Node, Work};
use crate::machine::available_bytes;
use crate::ops::Operand;
use crate::tensor::{Data, Tensor, count, is_float};

/// Bytes that one function takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// Constants in mapped files. The system may drop and read them again.
    pub mapped_bytes: u64,
    /// Weights that are kept decompressed.
    pub weight_bytes: u64,
    /// Intermediate values and buffers of operations, at most.
    pub activation_bytes: u64,
    /// Outputs.
    pub output_bytes: u64,
    /// States.
    pub state_bytes: u64,
}

impl Footprint {
    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.mapped_bytes + self.allocated_bytes()
    }

    /// What is allocated: all but the mapped files.
    pub fn allocated_bytes(&self) -> u64 {
        self.weight_bytes + self.activation_bytes + self.output_bytes + self.state_bytes
    }

    /// Refuses a function that would take more than it may: `max_memory` bytes, or what the machine has.
    pub(crate) fn check(&self, function: &str, max_memory: Option<u64>) -> Result<(), ExecError> {
        // What is mapped needs no memory of its own when the system is short of it.
        let (needed_bytes, limit_bytes) = match max_memory {
            Some(limit) => (self.total_bytes(), limit),
            None => match available_bytes() {
                Some(limit) => (self.allocated_bytes(), limit),
                None => return Ok(()),
            },
        };
        if needed_bytes <= limit_bytes {
            return Ok(());
        }
        let Footprint { mapped_bytes, weight_bytes, activation_bytes, output_bytes, state_bytes } = self;
        let what = format!(
            "mapped weights {mapped_bytes}, decompressed weights {weight_bytes}, activations {activation_bytes}, \
             outputs {output_bytes}, states {state_bytes}"
        );
        let function = function.to_owned();
        Err(ExecError::Memory { function, needed_bytes, what, limit_bytes, available: max_memory.is_none() })
    }
}

mod blocks;
mod buffers;

use buffers::{Seen, Sim};

/// Panels of a matrix product that each thread packs.
const PANELS: usize = 6 * 32 * 640 * 4;
/// Registers of row programs and what else a thread holds.
const THREAD: usize = 64 << 10;
/// Operations whose results show their operand's values in place, if those are stored side by side or need not be.
const VIEWS: &[&str] = &["transpose", "slice_by_index", "slice_by_size", "split", "identity"];
/// The same, where values must be side by side.
const RESHAPES: &[&str] = &["reshape", "expand_dims", "squeeze", "flatten2d", "reshape_like"];

/// What `function` takes on `threads` threads; `None` when a shape is only known when it runs.
/// `keeps_weights`: compressed weights are to be kept decompressed.
pub(crate) fn footprint(
    graph: &Graph,
    function: &Function,
    threads: usize,
    keeps_weights: bool,
) -> Option<Footprint> {
    let mut sim = Sim::default();
    let stored = |id: &ValueId| match &function.value(*id).ty {
        ValueType::Tensor(ty) | ValueType::State(ty) => {
            let bits = ty.dtype.bits().unwrap_or(8);
            Some(count(&ty.fixed_shape()?) * bits.max(8) / 8)
        }
        _ => None,
    };
    for id in &function.inputs {
        // Floats are read where the caller keeps them, integers are not.
        let bytes = value_bytes(graph, *id)?;
        let floats = is_float(graph.values[id.0 as usize].dtype?);
        let buffer = sim.allocate(if floats { 0 } else { bytes }, false);
        sim.define(*id, Seen { buffer, packed: true });
    }
    for id in &function.states {
        let buffer = sim.allocate(0, false);
        sim.define(*id, Seen { buffer, packed: true });
    }
    let mut scratch = 0;
    for node in &graph.nodes {
        scratch = scratch.max(node_scratch(graph, node));
        step(&mut sim, graph, node, keeps_weights)?;
    }
    // An output that is not packed is packed, then written.
    let mut leaving = 0;
    let mut output_bytes = 0;
    for (id, output) in function.block.outputs.iter().zip(&graph.outputs) {
        output_bytes += stored(id)?;
        let packed = output.value().and_then(|id| sim.values.get(&id)).is_some_and(|s| s.packed);
        let bytes = count(&function.tensor(*id)?.fixed_shape()?) * 4;
        leaving = leaving.max(if packed { 0 } else { bytes });
    }
    sim.others_at_most(leaving);
    let mut state_bytes = 0;
    for id in &function.states {
        state_bytes += stored(id)?;
    }
    Some(Footprint {
        mapped_bytes: mapped(function) as u64,
        weight_bytes: if keeps_weights { resident(graph) as u64 } else { 0 },
        activation_bytes: (sim.bytes() + threads * (scratch + THREAD)) as u64,
        output_bytes: output_bytes as u64,
        state_bytes: state_bytes as u64,
    })
}

/// Bytes of a value while a function runs: floats are `f32`, integers 32 bits.
fn value_bytes(graph: &Graph, id: ValueId) -> Option<usize> {
    let n = count(graph.known_shape(id)?);
    Some(if graph.values[id.0 as usize].dtype? == DataType::Bool { n } else { n * 4 })
}

/// Follows one node.
fn step(sim: &mut Sim, graph: &Graph, node: &Node, keeps_weights: bool) -> Option<()> {
    if !node.blocks().is_empty() {
        return blocks::step(sim, node, keeps_weights);
    }
    let mut transient = Vec::new();
    for (i, operand) in node.operands.iter().enumerate() {
        match operand {
            Operand::Fixed(t) if !keeps_weights && matches!(t.data, Data::Compressed(_)) => {
                // A compressed weight as a whole, or a few rows of it.
                let whole = t.count() * 4;
                let bytes = if node.takes_compressed(i) { whole.min(4 << 20) } else { whole };
                transient.push(sim.allocate(bytes, true));
            }
            Operand::Fixed(_) => {}
            Operand::Value(id) => {
                let seen = *sim.values.get(id)?;
                let floats = is_float(graph.values[id.0 as usize].dtype?);
                if copies(node, i, seen.packed) {
                    let bytes = value_bytes(graph, *id)?;
                    transient.push(sim.allocate(bytes, floats));
                }
            }
        }
    }
    if let Work::Attention(_) = &node.work {
        // Keys and values, packed into panels.
        for operand in &node.operands[1..3] {
            let bytes = match operand {
                Operand::Value(id) => value_bytes(graph, *id)?,
                Operand::Fixed(t) => t.count() * 4,
            };
            transient.push(sim.allocate(bytes + bytes / 8 + (64 << 10), false));
        }
    }
    // Views of an operand take nothing but keep it.
    let shown = shown(sim, graph, node);
    match (&node.work, shown) {
        (_, Some(seen)) => {
            for id in &node.outputs {
                sim.define(*id, seen);
            }
        }
        (Work::Rows(program, which), None) => {
            let results: Vec<usize> = (0..program.results.len())
                .map(|r| sim.allocate(program.rows * program.registers[program.results[r]] * 4, true))
                .collect();
            for (id, r) in node.outputs.iter().zip(which) {
                sim.define(*id, Seen { buffer: results[r.index], packed: true });
            }
        }
        (Work::Op(_) | Work::Attention(_) | Work::Cond(_) | Work::Loop { .. }, None) => {
            for id in &node.outputs {
                let floats = is_float(graph.values[id.0 as usize].dtype?);
                let bytes = value_bytes(graph, *id)?;
                let buffer = sim.allocate(bytes, floats);
                // Softmax over another axis than the last gives a permuted result; others give packed ones.
                sim.define(*id, Seen { buffer, packed: node.kind != "softmax" });
            }
        }
    }
    transient.into_iter().for_each(|buffer| sim.release(buffer));
    node.last_uses.iter().for_each(|id| sim.forget(*id));
    Some(())
}

/// Whether a node may copy operand `index` before it computes.
fn copies(node: &Node, index: usize, packed: bool) -> bool {
    let reads_in_place = match &node.work {
        Work::Rows(..) => packed,
        // The left factor; the right ones are packed into panels.
        Work::Attention(_) => packed || index == 1 || index == 2,
        Work::Cond(_) | Work::Loop { .. } => true,
        Work::Op(op) if op.as_matmul().is_some() => index == 0 && packed,
        Work::Op(_) => match node.kind.as_str() {
            kind if VIEWS.contains(&kind) => true,
            kind if RESHAPES.contains(&kind) => packed,
            "linear" | "gather" | "layer_norm" | "concat" | "add" | "sub" | "mul" | "real_div"
            | "softmax" | "silu" | "sigmoid" | "gelu" | "cast" | "select" => packed,
            // Others may pack, widen or reorder what they read.
            _ => false,
        },
    };
    !reads_in_place
}

/// What the results of a view show.
fn shown(sim: &Sim, graph: &Graph, node: &Node) -> Option<Seen> {
    let Work::Op(_) = &node.work else { return None };
    let Operand::Value(id) = node.operands.first()? else { return None };
    let seen = *sim.values.get(id)?;
    let kind = node.kind.as_str();
    if RESHAPES.contains(&kind) && seen.packed || kind == "identity" {
        return Some(seen);
    }
    let moves = graph.known_shape(*id).is_some_and(|s| count(s) > 1);
    VIEWS.contains(&kind).then_some(Seen { packed: seen.packed && !moves, ..seen })
}

/// Memory that each thread takes for a node.
fn node_scratch(graph: &Graph, node: &Node) -> usize {
    match &node.work {
        Work::Attention(attention) => attention.thread_bytes(),
        Work::Rows(program, _) => program.registers.iter().sum::<usize>() * 8,
        Work::Cond(_) | Work::Loop { .. } => {
            let inner = node.blocks().into_iter().flat_map(|block| &block.nodes);
            inner.map(|inner| node_scratch(graph, inner)).max().unwrap_or(0)
        }
        Work::Op(_) => match node.kind.as_str() {
            "linear" | "matmul" | "conv" | "einsum" => PANELS,
            // A row of one operation at a time.
            _ => node.outputs.iter().map(|id| row(graph, *id)).max().unwrap_or(0) * 8,
        },
    }
}

fn row(graph: &Graph, id: ValueId) -> usize {
    graph.known_shape(id).and_then(|s| s.last().copied()).unwrap_or(1)
}

/// Constants of a function in weight files, each counted once.
fn mapped(function: &Function) -> usize {
    let mut seen = HashSet::new();
    let constants = function.all_ops().into_iter().flat_map(|op| {
        let inline = op.inputs.values().flatten().filter_map(|a| match a {
            Argument::Constant(c) => Some(c),
            Argument::Value(_) => None,
        });
        inline.chain(op.attributes.values())
    });
    for constant in constants {
        if let ConstantData::Blob(blob) = &constant.data {
            seen.insert(*blob);
        }
    }
    seen.iter().map(|b| b.len_bytes).sum()
}

/// Every compressed weight that nodes or outputs read, those of blocks too, once each.
pub(crate) fn compressed_weights(graph: &Graph) -> Vec<&Arc<Compressed>> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    collect(graph, &mut found);
    found.retain(|weight| seen.insert(Arc::as_ptr(weight)));
    found
}

fn collect<'a>(graph: &'a Graph, found: &mut Vec<&'a Arc<Compressed>>) {
    found.extend(graph.nodes.iter().flat_map(|n| &n.operands).chain(&graph.outputs).filter_map(
        |o| match o {
            Operand::Fixed(Tensor { data: Data::Compressed(weight), .. }) => Some(weight),
            _ => None,
        },
    ));
    graph.nodes.iter().flat_map(Node::blocks).for_each(|block| collect(block, found));
}

fn resident(graph: &Graph) -> usize {
    compressed_weights(graph).into_iter().map(|w| w.resident_bytes()).sum()
}
